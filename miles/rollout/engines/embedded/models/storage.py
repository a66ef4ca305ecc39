"""Live parameter storage: fused matrices for speed, Hugging Face names as views into them."""

from __future__ import annotations

import torch


class ParameterStore:
    """Allocates storage and remembers which name lives where.

    A fused group is one tensor whose row blocks are the named parameters: writing a named view in place changes
    the fused tensor, so a weight update needs no copy and no rebuilding.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.by_name: dict[str, torch.Tensor] = {}
        self.alias_of: dict[str, str] = {}
        self._blocks: list[torch.Tensor] = []

    def add(self, name: str, *shape: int) -> torch.Tensor:
        return self.fused({name: shape})

    def fused(self, parts: dict[str, tuple[int, ...]]) -> torch.Tensor:
        """One tensor of all parts stacked along the first dimension; each part is contiguous."""
        shapes = list(parts.values())
        tail = shapes[0][1:]
        storage = torch.empty((sum(s[0] for s in shapes), *tail), dtype=self.dtype, device=self.device)
        self._blocks.append(storage)
        row = 0
        for name, shape in parts.items():
            self.by_name[name] = storage[row : row + shape[0]]
            row += shape[0]
        return storage

    @property
    def held_bytes(self) -> int:
        """Memory of all parameters: 0 while it is released."""
        return sum(block.untyped_storage().nbytes() for block in self._blocks)

    def release(self) -> None:
        """Free the memory; every tensor keeps its shape and must not be read."""
        for block in self._blocks:
            block.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate again, as zeros."""
        for block in self._blocks:
            if block.untyped_storage().nbytes() == 0:
                block.untyped_storage().resize_(block.numel() * block.element_size())
                block.zero_()

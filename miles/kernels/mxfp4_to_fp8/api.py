"""`mxfp4_to_fp8`: convert a list of MXFP4 weights in one launch. CUDA, HIP, or CPU under the Triton interpreter.

Equal to `reference.convert` bit for bit. Unlike training kernels this call reads its error flag at the end
(one synchronisation): a NaN scale raises and names weight and tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.runtime.interpreter import InterpretedFunction

from miles.kernels.mxfp4_to_fp8 import kernel
from miles.kernels.mxfp4_to_fp8.reference import BLOCK, TILE, Converted, check_inputs, conversion_table
from miles.kernels.weight_table import on_device, weight_table

_tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def _lookup(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 [20]: eight E4M3 bytes, int32 [20]: a bit per inexact magnitude) on the device."""
    if device not in _tables:
        codes, inexact = conversion_table()
        mask = (inexact.to(torch.int32) << torch.arange(8, dtype=torch.int32)).sum(1, dtype=torch.int32)
        _tables[device] = codes.contiguous().view(torch.int64).view(-1).to(device), mask.to(device)
    return _tables[device]


def _check(packed: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> None:
    if not packed or len(packed) != len(scales):
        raise ValueError(f"need as many scales as weights, at least one, got {len(packed)} and {len(scales)}")
    for i, (p, s) in enumerate(zip(packed, scales, strict=True)):
        check_inputs(p, s)
        if p.device != packed[0].device or s.device != packed[0].device:
            raise ValueError(
                f"weights[{i}]: on {p.device} with scale on {s.device}, weights[0] is on {packed[0].device}"
            )
        if not (p.is_contiguous() and s.is_contiguous()) or p.data_ptr() % 16:
            raise ValueError(f"weights[{i}]: weight and scale must be contiguous and the weight 16-byte aligned")
    if packed[0].device.type != "cuda" and not isinstance(kernel.tile_kernel, InterpretedFunction):
        raise TypeError(
            f"weights on {packed[0].device}: use reference.convert, or set TRITON_INTERPRET=1 before the import"
        )


def mxfp4_to_fp8(packed: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[Converted]:
    """`packed[i]` uint8/int8 [M, N/2], `scales[i]` e8m0 codes [M, N/32]; returns device tensors, one result a weight."""
    launch = _Launch(packed, scales)
    launch.run()
    launch.raise_if_nan()
    return launch.results()


class _Launch:
    """Buffers of one call, so that a benchmark can repeat `run` alone."""

    def __init__(
        self,
        packed: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        warps: int = 8,
        registers: int = 40,
    ) -> None:
        _check(packed, scales)
        device = packed[0].device
        self.packed = [p.view(torch.uint8) for p in packed]
        self.scales = [s.view(torch.uint8) for s in scales]
        self.shapes = [(p.shape[0], p.shape[1] * 2) for p in packed]
        self.grids = [(-(-m // TILE), -(-n // TILE)) for m, n in self.shapes]
        sources, scale_offsets, rows, cols, outputs, first_tiles = [], [], [], [], [], []
        output, tile = 0, 0
        for p, s, (m, n) in zip(self.packed, self.scales, self.shapes, strict=True):
            sources.append((p.data_ptr() - self.packed[0].data_ptr()) // 16)
            scale_offsets.append(s.data_ptr() - self.scales[0].data_ptr())
            rows.append(m)
            cols.append(n // BLOCK)
            outputs.append(output)
            first_tiles.append(tile)
            output += m * n // 16
            tile += -(-m // TILE) * -(-n // TILE)
        tiles = [a * b for a, b in self.grids]
        self.warps, self.registers = warps, registers
        self.table = weight_table((sources, scale_offsets, rows, cols, outputs, first_tiles), tiles, 1, device)
        self.q = torch.empty(output * 16, dtype=torch.uint8, device=device)
        self.scale = torch.empty(sum(tiles), dtype=torch.uint8, device=device)
        self.info = torch.empty(sum(tiles), dtype=torch.int32, device=device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.device = device

    def run(self) -> None:
        nvidia = self.device.type == "cuda" and torch.version.hip is None
        # Fewer registers than the compiler likes: one more program fits on a multiprocessor.
        limits = {"maxnreg": self.registers} if nvidia else {}
        with on_device(self.device):
            kernel.tile_kernel[(self.table.chunks,)](
                self.packed[0].view(-1).view(torch.int32), self.scales[0], self.table.columns, self.table.chunk_weight,
                *_lookup(self.device), self.q.view(torch.int32), self.scale, self.info, self.flag, self.table.n,
                PTX=nvidia, num_warps=self.warps, **limits,
            )  # fmt: skip

    def raise_if_nan(self) -> None:
        tile = int(self.flag.item()) - 1
        if tile < 0:
            return
        for i, (rows, cols) in enumerate(self.grids):
            if tile < rows * cols:
                raise ValueError(f"weights[{i}]: scale code 255 (NaN) in tile [{tile // cols}, {tile % cols}]")
            tile -= rows * cols

    def results(self) -> list[Converted]:
        qs = self.q.split([m * n for m, n in self.shapes])
        tiles = [a * b for a, b in self.grids]
        parts = zip(self.shapes, self.grids, qs, self.scale.split(tiles), self.info.split(tiles), strict=True)
        return [
            Converted(q.view(shape), s.view(grid), ((info >> 16) - 1).view(grid), (info & 0xFFFF).view(grid))
            for shape, grid, q, s, info in parts
        ]

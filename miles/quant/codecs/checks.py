"""Input checks shared by the codecs."""

from __future__ import annotations

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_weight(weight: torch.Tensor, name: str, *, block: int = 1, dims: tuple[int, ...] = (2,)) -> None:
    """A non-empty bf16, fp16 or fp32 tensor of an allowed rank whose last dimension is a multiple of `block`."""
    if weight.dtype not in FLOATS:
        raise TypeError(f"{name}: dtype {weight.dtype} is not bfloat16, float16 or float32")
    if weight.dim() not in dims or weight.numel() == 0:
        raise ValueError(
            f"{name}: needs a non-empty tensor of rank {' or '.join(map(str, dims))}, got {tuple(weight.shape)}"
        )
    if weight.shape[-1] % block:
        raise ValueError(f"{name}: last dimension {weight.shape[-1]} is not a multiple of the block size {block}")


def check_finite(weight: torch.Tensor, name: str) -> None:
    """Raises with the first index of a NaN or an infinity."""
    finite = torch.isfinite(weight)
    if not bool(finite.all()):
        index = tuple(int(i) for i in (~finite).nonzero()[0])
        raise ValueError(f"{name}: {float(weight[index])} at index {list(index)}; quantisation needs finite weights")


def check_rounded(rounded: torch.Tensor, name: str) -> torch.Tensor:
    """`rounded`, the result of finite weights; raises where one became infinite: a scale rounded up leaves its type."""
    finite = torch.isfinite(rounded)
    if not bool(finite.all()):
        index = tuple(int(i) for i in (~finite).nonzero()[0])
        raise ValueError(
            f"{name}: the weight at index {list(index)} rounds to {float(rounded[index])} in {rounded.dtype}; "
            "its scale rounded up exceeds that type, use a wider one or smaller weights"
        )
    return rounded


def fp32_scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """A device scalar: dividing by a Python number becomes a multiplication by its reciprocal on CUDA."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)

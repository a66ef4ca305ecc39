"""The MXFP4 to FP8 kernel on a GPU gives the reference's bytes, scales and loss counts."""

from __future__ import annotations

import pytest
import torch

from miles.kernels.mxfp4_to_fp8 import api, reference
from miles_ci.declare import register_cuda_ci

register_cuda_ci(est_time=10, suite="stage-b-1-gpu-h200", hardware=["h200"], num_gpus=1, labels=["kernels"])

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def weight(m: int, n: int, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m * n + low)
    packed = torch.randint(0, 256, (m, n // 2), dtype=torch.uint8, generator=generator)
    packed[torch.rand(m, n // 2, generator=generator) < 0.3] = 0
    packed.view(m, n // 32, 16)[torch.rand(m, n // 32, generator=generator) < 0.2] = 8
    return packed, torch.randint(low, high, (m, n // 32), dtype=torch.uint8, generator=generator)


def test_one_launch_over_many_shapes_equals_the_reference() -> None:
    cases = [
        weight(m, n, low, high)
        for m, n in [(128, 128), (1, 32), (130, 160), (300, 416), (1024, 2048)]
        for low, high in ((118, 124), (100, 140), (0, 12), (90, 110), (240, 255))
    ]
    got = api.mxfp4_to_fp8([p.cuda() for p, _ in cases], [s.cuda() for _, s in cases])
    for (packed, scale), result in zip(cases, got, strict=True):
        want = reference.convert(packed, scale)
        for field in ("q", "scale", "max_k", "lossy"):
            assert torch.equal(getattr(result, field).cpu(), getattr(want, field)), (tuple(packed.shape), field)


def test_nan_scale_names_weight_and_tile() -> None:
    cases = [weight(256, 256, 118, 124), weight(130, 300 // 32 * 32, 118, 124)]
    cases[1][1][129, 5] = 255
    with pytest.raises(ValueError, match=r"weights\[1\]: scale code 255 \(NaN\) in tile \[1, 1\]"):
        api.mxfp4_to_fp8([p.cuda() for p, _ in cases], [s.cuda() for _, s in cases])

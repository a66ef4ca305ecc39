"""Weights on a GPU that is not the current one stay there, and the current one is restored."""

from __future__ import annotations

import pytest
import torch

from miles.kernels.mxfp4_to_fp8 import api as mxfp4_api
from miles.kernels.mxfp4_to_fp8 import reference as mxfp4_reference
from miles.kernels.nvfp4_qdq import api, reference
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles_ci.declare import register_cuda_ci

register_cuda_ci(est_time=15, suite="stage-b-2-gpu-h200", hardware=["h200"], num_gpus=2, labels=["kernels"])

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_qdq_on_a_device_that_is_not_current() -> None:
    w = torch.randn(128, 256).to(torch.bfloat16).to("cuda:1")
    assert torch.cuda.current_device() == 0
    for config in (NVFP4QDQConfig(), NVFP4QDQConfig(True)):
        y = api.qdq_nvfp4([w], config)[0]
        assert y.device == w.device
        assert torch.cuda.current_device() == 0
        assert torch.equal(y, reference.qdq(w, config))


def test_conversion_on_a_device_that_is_not_current() -> None:
    packed = torch.randint(0, 256, (130, 80), dtype=torch.uint8)
    scale = torch.randint(116, 124, (130, 5), dtype=torch.uint8)
    got = mxfp4_api.mxfp4_to_fp8([packed.to("cuda:1")], [scale.to("cuda:1")])[0]
    want = mxfp4_reference.convert(packed, scale)
    assert got.q.device == torch.device("cuda:1")
    assert torch.equal(got.q.cpu(), want.q)
    assert torch.equal(got.scale.cpu(), want.scale)

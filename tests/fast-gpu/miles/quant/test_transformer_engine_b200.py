"""Against Transformer Engine on Blackwell: its NVFP4 kernels give our codes, scales and values, bit for bit; and its
grouped linear, with our fake quantisation before it, computes with the quantised weights forward and backward."""

from __future__ import annotations

import pytest
import torch

from miles.kernels.formats import unpack_e2m1
from miles.kernels.nvfp4_qdq import api, reference
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.quant import qat
from miles_ci.declare import register_cuda_ci

register_cuda_ci(est_time=120, suite="stage-c-4-gpu-b200", hardware=["b200"], num_gpus=1, labels=["kernels"])

BLACKWELL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
pytestmark = pytest.mark.skipif(not BLACKWELL, reason="needs compute capability 10.0")
te = pytest.importorskip("transformer_engine.pytorch") if BLACKWELL else None

SHAPES = [
    (16, 16), (32, 64), (128, 128), (256, 272), (304, 304), (320, 256), (512, 1024),
    (1024, 256), (1024, 1024), (1056, 992), (2048, 2048), (2048, 6144), (8192, 1024),
]  # fmt: skip
CONFIGS = [
    NVFP4QDQConfig(),
    *(NVFP4QDQConfig(True, e, mode) for e in (448, 256) for mode in ErrorMode),
]


def quantizer(config: NVFP4QDQConfig):
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    return NVFP4Quantizer(
        columnwise=False,
        nvfp4_use_4over6=config.use_4over6,
        nvfp4_e4m3_max=config.e4m3_max,
        nvfp4_4over6_err_mode=config.error_mode.value,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.use_4over6}-{c.e4m3_max}-{c.error_mode.value}")
def test_equal_to_transformer_engine(config: NVFP4QDQConfig, shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[0] + shape[1])
    w = (torch.randn(shape, device="cuda") * torch.exp(torch.randn(shape, device="cuda"))).to(torch.bfloat16)
    theirs = quantizer(config)(w)
    blocks = reference.quantize_blocks(w, reference.tensor_amax(w), config)
    rows, groups = shape[0], shape[1] // 16
    assert torch.equal(unpack_e2m1(theirs._rowwise_data.view(torch.uint8)), blocks.codes.flatten(1))
    assert torch.equal(theirs._rowwise_scale_inv.view(torch.uint8)[:rows, :groups], blocks.scale8)
    assert torch.equal(theirs.dequantize(dtype=torch.bfloat16), api.qdq_nvfp4([w], config)[0])


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2]], ids=["standard", "4over6"])
def test_grouped_linear_computes_with_quantised_weights(config: NVFP4QDQConfig) -> None:
    torch.manual_seed(0)
    splits, k, n = [64, 0, 128, 64], 256, 512
    module = torch.nn.Module()
    module.mlp = torch.nn.Module()
    module.mlp.experts = torch.nn.Module()
    linear = te.GroupedLinear(len(splits), k, n, bias=False, params_dtype=torch.bfloat16, device="cuda")
    module.mlp.experts.linear_fc1 = linear
    x = torch.randn(sum(splits), k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(sum(splits), n, device="cuda", dtype=torch.bfloat16)
    rounded = api.qdq_nvfp4([getattr(linear, f"weight{i}").detach() for i in range(len(splits))], config)
    want = torch.cat([part @ w.t() for part, w in zip(x.detach().split(splits), rounded, strict=True)])
    state = qat.install(module, config)
    assert sorted(state.names) == [f"mlp.experts.linear_fc1.weight{i}" for i in range(len(splits))]
    y = linear(x, splits)
    y.backward(upstream)
    torch.testing.assert_close(y, want, rtol=1e-2, atol=1e-2)
    for i, (part, grad) in enumerate(zip(x.detach().split(splits), upstream.split(splits), strict=True)):
        torch.testing.assert_close(getattr(linear, f"weight{i}").grad, grad.t() @ part, rtol=2e-2, atol=2e-2)
    dx = torch.cat([g @ w for g, w in zip(upstream.split(splits), rounded, strict=True)])
    torch.testing.assert_close(x.grad, dx, rtol=2e-2, atol=2e-2)
    qat.assert_called(module, 1)

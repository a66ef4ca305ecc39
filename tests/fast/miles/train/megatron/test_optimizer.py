"""The optimizer step against torch's own AdamW, and what start-up must not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from miles_ci.declare import register_cpu_ci

register_cpu_ci(20, "stage-a-cpu", nightly=True)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_step_equals_torch_adamw_with_clipping(decay, ranks, toolbox, model_dir):
    def body(rank, world, port):
        import torch

        from miles.train.megatron.optimizer import MasterAdamW, learning_rate

        backend = toolbox.backend(model_dir, rank, world, port, lr=3e-3)
        settings = backend.policy.optimizer.config.model_copy(
            update={"weight_decay": decay, "clip_grad": 0.5, "warmup_steps": 3}
        )
        optimizer = MasterAdamW(backend.policy.chunks, settings, backend.mesh, lambda name: False)
        reference = [torch.nn.Parameter(item.weight.clone()) for item in optimizer.masters]
        groups = [
            {"params": [p for p in reference if p.ndim > 1], "weight_decay": decay},
            {"params": [p for p in reference if p.ndim <= 1], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=1.0, betas=settings.betas, eps=settings.eps, foreach=False, fused=False)
        generator = torch.Generator().manual_seed(0)
        for step in range(5):
            for item, parameter in zip(optimizer.masters, reference, strict=True):
                item.grad.copy_(torch.randn(item.grad.shape, generator=generator))
                parameter.grad = item.grad.clone()
            expected = torch.nn.utils.clip_grad_norm_(reference, 0.5)
            for group in adamw.param_groups:
                group["lr"] = learning_rate(step, settings)
            adamw.step()
            norm = optimizer.grad_norm()
            assert norm == pytest.approx(expected.item(), rel=1e-5)
            assert optimizer.apply(norm) == pytest.approx(3e-3 * min(1.0, (step + 1) / 3))
        for item, parameter in zip(optimizer.masters, reference, strict=True):
            torch.testing.assert_close(item.weight, parameter.detach(), rtol=1e-5, atol=1e-6)
            assert item.parameter.data_ptr() == item.weight.data_ptr()

    ranks(body, 1)


@pytest.mark.parametrize(("norm", "scale"), [(0.1, 1.0), (0.4999, 1.0), (0.5, 1.0), (0.6, 0.5 / 0.6), (50.0, 0.01)])
def test_clipping_scales_gradients_down_to_the_bound_and_never_up(norm, scale, ranks, toolbox, model_dir):
    def body(rank, world, port):
        import torch

        backend = toolbox.backend(model_dir, rank, world, port)
        optimizer = backend.policy.optimizer
        optimizer.config = optimizer.config.model_copy(update={"clip_grad": 0.5})
        generator = torch.Generator().manual_seed(0)
        before = [torch.randn(item.grad.shape, generator=generator) for item in optimizer.masters]
        for item, gradient in zip(optimizer.masters, before, strict=True):
            item.grad.copy_(gradient)
        optimizer.apply(norm)
        for item, gradient in zip(optimizer.masters, before, strict=True):
            torch.testing.assert_close(item.grad, gradient * scale, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(item.exp_avg, gradient * (scale * 0.1), rtol=1e-5, atol=1e-7)

    ranks(body, 1)


WORKER = """
import sys
from pathlib import Path
from miles.algos.config import AlgoConfig
from miles.train.config import TrainConfig
from miles.train.megatron.backend import MegatronBackend
backend = MegatronBackend(config=TrainConfig(), algo=AlgoConfig(), model_dir=Path(sys.argv[1]), rank=0,
    world_size=1, device="cpu", master_addr="127.0.0.1", master_port=0, seed=0)
assert "megatron" not in sys.modules, "megatron-core is imported by init, not by the import of the backend"
backend.init()
backend.load()
norm = backend.policy.optimizer.grad_norm()
backend.policy.optimizer.apply(norm)
print([name for name in ("torch._dynamo", "torch._inductor", "transformers") if name in sys.modules])
"""


def test_a_cpu_worker_never_imports_the_compiler(model_dir):
    """It takes seconds, and every worker would pay. In a fresh process: other tests import it here."""
    command = [sys.executable, "-c", WORKER, str(model_dir)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_learning_rate_schedules():
    from miles.train.config import OptimizerConfig
    from miles.train.megatron.optimizer import learning_rate

    cosine = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=2, decay="cosine", decay_steps=10)
    rates = [learning_rate(step, cosine) for step in range(12)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert rates[6] == pytest.approx(0.55)
    assert rates[10] == rates[11] == pytest.approx(0.1)
    constant = OptimizerConfig(lr=1.0)
    assert {learning_rate(step, constant) for step in range(100)} == {1.0}

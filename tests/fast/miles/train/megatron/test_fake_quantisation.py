"""Fake quantisation installed through the backend's hook: every expert runs it, gradients pass, masters stay exact."""

from __future__ import annotations

import pytest


def quantised(toolbox, moe_dir, act, *, recompute=None, **parallel):
    """Body of a rank: a backend with NVFP4 fake quantisation on its experts; `act(backend, hook, batch)`."""

    def body(rank, world, port):
        from miles.quant.config import QuantConfig
        from miles.quant.hook import FakeQATHook

        holder = []
        hook = FakeQATHook(
            QuantConfig(fake_qat="nvfp4"), environ={}, group=lambda: holder[0].mesh.expert_tp if holder else None
        )
        backend = toolbox.backend(
            moe_dir, rank, world, port, install=hook, announce=holder.append, recompute=recompute, **parallel
        )
        multiple = parallel["tp"] if parallel.get("sp") else 1
        samples = toolbox.samples(ragged=True, response=6, off_policy=True)
        batch = toolbox.batch(samples, dp=parallel.get("dp", 1), multiple=multiple, tokens=80)
        return act(backend, hook, batch.for_rank(backend.parallel_layout.dp_rank))

    return body


def train(backend, hook, batch):
    from miles.quant import qat

    before = {name: tensor.clone() for name, tensor in backend.policy.optimizer.master_tensors().items()}
    metrics = backend.step(batch)
    calls = qat.calls(hook.chunks[0])
    qat.assert_called(hook.chunks[0], len(batch.micro_batches))
    moved = [name for name, old in before.items() if not old.equal(backend.policy.optimizer.master_tensors()[name])]
    return metrics, calls, moved


def test_every_expert_runs_the_hook_and_still_learns(ranks, toolbox, moe_dir):
    metrics, calls, moved = ranks(quantised(toolbox, moe_dir, train), 1)[0]
    assert len(calls) == 2 * 4 * 2, "2 layers, 4 experts, 2 linears"
    assert all(name in moved for name in (f"{call}.weight" for call in calls))
    assert metrics["train/grad_norm"] > 0


def test_quantisation_changes_the_forward_pass(ranks, toolbox, moe_dir):
    import numpy as np

    def scores(backend, hook, batch):
        from miles.quant import qat

        with_hook = np.concatenate(backend.logprobs(batch))
        qat.uninstall(hook.chunks[0])
        return with_hook, np.concatenate(backend.logprobs(batch))

    with_hook, without = ranks(quantised(toolbox, moe_dir, scores), 1)[0]
    assert 1e-3 < np.abs(with_hook - without).max() < 5


@pytest.mark.parametrize("parallel", [{"dp": 2, "ep": 2}, {"tp": 2, "sp": True}], ids=["ep2", "etp2_shared_maximum"])
def test_quantised_step_is_equal_under_every_mesh(parallel, ranks, toolbox, moe_dir):
    expected = ranks(quantised(toolbox, moe_dir, train), 1)[0][0]
    for metrics, _, _ in ranks(quantised(toolbox, moe_dir, train, **parallel), 2):
        for key in ("train/loss", "train/grad_norm"):
            assert metrics[key] == pytest.approx(expected[key], rel=1e-4), key


def test_recompute_quantises_to_the_same_bits(ranks, toolbox, moe_dir):
    expected = ranks(quantised(toolbox, moe_dir, train), 1)[0][0]
    again, calls, _ = ranks(quantised(toolbox, moe_dir, train, recompute={"granularity": "full"}), 1)[0]
    assert again["train/loss"] == expected["train/loss"]
    assert again["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-6)
    assert min(calls.values()) >= 4, "once forward and once again, for each of two micro-batches"


def test_removing_the_hook_stops_the_run(ranks, toolbox, moe_dir):
    from miles.quant.errors import QATHookMissing

    def sabotage(backend, hook, batch):
        from miles.quant import qat

        backend.step(batch)
        qat.assert_called(hook.chunks[0], len(batch.micro_batches))
        victim = hook.chunks[0].get_submodule("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1")
        victim.__dict__.pop("forward")
        backend.step(batch)
        qat.assert_called(hook.chunks[0], len(batch.micro_batches))

    with pytest.raises(QATHookMissing, match=r"local_experts\.1\.linear_fc1"):
        ranks(quantised(toolbox, moe_dir, sabotage), 1)

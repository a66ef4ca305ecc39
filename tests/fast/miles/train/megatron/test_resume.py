"""Resuming from a checkpoint: bit-exact on the same mesh, and on any other mesh from the same weights and moments."""

from __future__ import annotations

import os
import signal
import time

import pytest


def batches(toolbox, count, **options):
    return [toolbox.batch(toolbox.samples(seed=seed, ragged=True), **options) for seed in range(count)]


def train(toolbox, model_dir, folder, start, stop, *, save_at=(), **parallel):
    """Body of a rank: resume if there is anything, train steps [start, stop), save after the steps of `save_at`."""

    def body(rank, world, port):
        import torch

        backend = toolbox.backend(model_dir, rank, world, port, **parallel)
        resumed = backend.load_checkpoint(folder)
        assert (resumed is None) == (start == 0)
        first = torch.rand(1).item()
        curve = []
        steps = batches(toolbox, stop, dp=parallel.get("dp", 1))
        for step in range(start, stop):
            metrics = backend.step(steps[step].for_rank(backend.parallel_layout.dp_rank))
            curve.append((metrics["train/loss"], metrics["train/grad_norm"], metrics["train/lr"]))
            if step + 1 in save_at:
                backend.save(folder, extra={"step": step + 1, "cursor": {"prompt": step}})
        return curve, (first, torch.rand(1).item()), resumed, dict(backend.state_for_sync())

    return body


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"dp": 2}], ids=["single", "tp2", "dp2"])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(parallel, ranks, toolbox, model_dir, tmp_path):
    import torch

    world = 2 if parallel else 1
    whole = ranks(train(toolbox, model_dir, tmp_path, 0, 5, save_at=(3,), **parallel), world)
    resumed = ranks(train(toolbox, model_dir, tmp_path, 3, 5, **parallel), world)
    for (curve, drawn, _, weights), (later, drawn_later, found, weights_later) in zip(whole, resumed, strict=True):
        assert curve[3:] == later
        assert found.extra == {"step": 3, "cursor": {"prompt": 2}}
        assert found.step == 3
        assert all(torch.equal(weights[name], weights_later[name]) for name in weights)
        assert drawn_later[0] == drawn[1], "the random state comes back too"
    assert whole[0][3], "rank 0 yields weights"


@pytest.mark.parametrize(
    ("before", "after"),
    [({"tp": 2}, {}), ({}, {"tp": 2}), ({"dp": 2}, {"tp": 2}), ({"pp": 2}, {}), ({"cp": 2}, {"pp": 2})],
    ids=["tp2_to_1", "1_to_tp2", "dp2_to_tp2", "pp2_to_1", "cp2_to_pp2"],
)
def test_any_mesh_loads_any_checkpoint_bit_for_bit(before, after, ranks, toolbox, model_dir, tmp_path):
    import torch

    size = {(): 1}.get(tuple(before), 2)
    first = ranks(train(toolbox, model_dir, tmp_path, 0, 2, save_at=(2,), **before), size)

    def reload(rank, world, port):
        backend = toolbox.backend(model_dir, rank, world, port, loaded=False, **after)
        backend.load_checkpoint(tmp_path)
        moments = backend.policy.optimizer.moments()["exp_avg_sq"]
        full = dict(backend.policy.full_tensors.gather(moments))
        return dict(backend.state_for_sync()), full, backend.policy.optimizer.steps

    got, moments, steps = ranks(reload, {(): 1}.get(tuple(after), 2))[0]
    assert steps == 2
    assert all(torch.equal(first[0][3][name], got[name]) for name in got)
    assert set(moments) == set(got)
    assert any(moment.abs().sum() > 0 for moment in moments.values())


@pytest.mark.parametrize(
    ("before", "after"), [({"dp": 2, "ep": 2}, {}), ({}, {"dp": 2, "ep": 2})], ids=["2to1", "1to2"]
)
def test_experts_reshard_bit_for_bit(before, after, ranks, toolbox, moe_dir, tmp_path):
    import torch

    first = ranks(train(toolbox, moe_dir, tmp_path, 0, 2, save_at=(2,), **before), 2 if before else 1)

    def reload(rank, world, port):
        backend = toolbox.backend(moe_dir, rank, world, port, loaded=False, **after)
        backend.load_checkpoint(tmp_path)
        return dict(backend.state_for_sync())

    got = ranks(reload, 2 if after else 1)[0]
    assert got.keys() == first[0][3].keys()
    assert all(torch.equal(first[0][3][name], got[name]) for name in got)


def test_saving_again_replaces_and_prunes_and_names_what_it_skipped(ranks, toolbox, model_dir, tmp_path):
    ranks(train(toolbox, model_dir, tmp_path, 0, 4, save_at=(1, 2, 3, 4)), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_3", "iter_4", "latest"]
    assert (tmp_path / "latest").read_text() == "iter_4\n"
    shard = tmp_path / "iter_4/rank_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (tmp_path / "iter_5.tmp").mkdir()

    def body(rank, world, port):
        return toolbox.backend(model_dir, rank, world, port, loaded=False).load_checkpoint(tmp_path)

    found = ranks(body, 1)[0]
    assert found.step == 3
    reasons = {item.name: item.reason for item in found.skipped}
    assert "interrupted" in reasons["iter_5.tmp"]
    assert "sha256" in reasons["iter_4"]
    assert "rank_00000.safetensors" in reasons["iter_4"]


def test_a_checkpoint_of_another_model_is_refused(ranks, toolbox, model_dir, tokenizer_dir, tmp_path):
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint
    from miles.train.errors import CheckpointError

    other = create_checkpoint(
        tmp_path / "m", shape=ModelShape(hidden_size=16, head_dim=4), tokenizer_dir=tokenizer_dir, seed=0
    )
    ranks(train(toolbox, model_dir, tmp_path / "run", 0, 1, save_at=(1,)), 1)

    def body(rank, world, port):
        toolbox.backend(other, rank, world, port).load_checkpoint(tmp_path / "run")

    with pytest.raises(CheckpointError, match=r"another config\.json"):
        ranks(body, 1)


def test_kill_during_save_leaves_the_last_complete_checkpoint_usable(ranks, toolbox, model_dir, tmp_path):
    """A child saves in a loop and is killed at ten moments; what is left always loads, at or after the last full save."""
    from miles.train import checkpoint

    def body(rank, world, port):
        backend = toolbox.backend(model_dir, rank, world, port)
        for number in range(1, 10_000):
            # Saving under two numbers also exercises the replacement of an existing folder.
            backend.save(tmp_path, extra={"step": number % 2 + 1, "number": number})
            (tmp_path / "saved.new").write_text(str(number))
            (tmp_path / "saved.new").rename(tmp_path / "saved")

    for moment in range(10):
        process = os.fork()
        if process == 0:
            try:
                body(0, 1, 0)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 20
        while not (tmp_path / "saved").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.003 + 0.0037 * moment)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        last = int((tmp_path / "saved").read_text())
        (tmp_path / "saved").unlink()
        found = checkpoint.find(tmp_path)
        assert found.manifest is not None, [item.reason for item in found.skipped]
        assert found.manifest.extra["number"] <= last + 1

"""One recorded step repeats bit for bit on the same mesh, closely on another, and never silently differs."""

from __future__ import annotations

import json

import pytest


def record(toolbox, model_dir, root, dp=1):
    def body(rank, world, port):
        from miles.train.replay import record_step

        backend = toolbox.backend(model_dir, rank, world, port, dp=dp)
        steps = [toolbox.batch(toolbox.samples(seed=seed, ragged=True, off_policy=True), dp=dp) for seed in (0, 1)]
        backend.step(steps[0].for_rank(rank))
        return record_step(backend, steps[1].for_rank(rank), root, step=7, manifest={"recipe": {"name": "test"}})

    return body


def replay(toolbox, model_dir, folder, mode="bit", change=None, **parallel):
    def body(rank, world, port):
        from miles.train.replay import replay_step

        backend = toolbox.backend(model_dir, rank, world, port, loaded=False, **parallel)
        if change is not None:
            change(backend)
        return replay_step(folder, backend, mode=mode)

    return body


@pytest.fixture(scope="module")
def bundle(ranks, toolbox, model_dir, tmp_path_factory):
    """A step recorded by two data-parallel ranks."""
    root = tmp_path_factory.mktemp("replay")
    metrics = ranks(record(toolbox, model_dir, root, dp=2), 2)[0]
    return root / "step_7", metrics


def test_replay_on_the_same_mesh_is_bit_equal(bundle, ranks, toolbox, model_dir):
    folder, metrics = bundle
    for report in ranks(replay(toolbox, model_dir, folder, dp=2), 2):
        assert report.reproduced, report.differences
        assert report.results == metrics
        assert report.step == 7


def test_replay_on_one_process_is_close(bundle, ranks, toolbox, model_dir):
    report = ranks(replay(toolbox, model_dir, bundle[0], mode="close"), 1)[0]
    assert report.reproduced, report.differences


def test_another_mesh_is_named_when_bits_are_asked_for(bundle, ranks, toolbox, model_dir):
    from miles.data.replay import ReplayError

    with pytest.raises(ReplayError, match=r"cannot be replayed bit for bit: mesh is .*--mode close"):
        ranks(replay(toolbox, model_dir, bundle[0]), 1)


def test_a_changed_optimizer_setting_is_detected(bundle, ranks, toolbox, model_dir):
    def shrink(backend):
        settings = backend.policy.optimizer.config
        backend.policy.optimizer.config = settings.model_copy(update={"lr": settings.lr / 2})

    report = ranks(replay(toolbox, model_dir, bundle[0], change=shrink, dp=2), 2)[0]
    assert not report.reproduced
    assert all("after the step" in text for text in report.differences)


def test_flipped_byte_is_refused_and_named(bundle, ranks, toolbox, model_dir, tmp_path):
    import shutil

    from miles.data.replay import ReplayError

    shutil.copytree(bundle[0].parent, tmp_path / "copy")
    path = tmp_path / "copy/step_7/rank_1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ReplayError, match=r"rank_1\.safetensors: content changed"):
        ranks(replay(toolbox, model_dir, tmp_path / "copy/step_7", dp=2), 2)


def test_bundle_names_mesh_versions_and_the_callers_facts(bundle):
    manifest = json.loads((bundle[0] / "manifest.json").read_text())
    assert manifest["mesh"]["dp"] == 2
    assert manifest["recipe"] == {"name": "test"}
    assert "megatron-core" in manifest["versions"]

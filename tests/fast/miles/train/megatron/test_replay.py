"""One recorded step repeats bit for bit on the same mesh, closely on another, and never silently differs."""

from __future__ import annotations

import json
import shutil

import numpy as np
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

    with pytest.raises(ReplayError, match=r"bit for bit: mesh\.dp is 1 here but 2 in the bundle; use --mode close"):
        ranks(replay(toolbox, model_dir, bundle[0]), 1)


def test_a_changed_optimizer_setting_is_detected(bundle, ranks, toolbox, model_dir):
    def shrink(backend):
        settings = backend.policy.optimizer.config
        backend.policy.optimizer.config = settings.model_copy(update={"lr": settings.lr / 2})

    report = ranks(replay(toolbox, model_dir, bundle[0], change=shrink, dp=2), 2)[0]
    assert not report.reproduced
    assert all("after the step" in text for text in report.differences)


def test_flipped_byte_is_refused_and_named(bundle, ranks, toolbox, model_dir, tmp_path):
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


def damaged(bundle, tmp_path, *, checkpoint=None, manifest=None):
    """A copy of the bundle; `checkpoint` changes its folder, `manifest` its facts (the hash follows)."""
    import hashlib

    folder = tmp_path / "step_7"
    shutil.copytree(bundle[0], folder)
    shutil.copytree(bundle[0].parent / "step_7.checkpoint", tmp_path / "step_7.checkpoint")
    if checkpoint is not None:
        checkpoint(tmp_path / "step_7.checkpoint")
    if manifest is not None:
        path, marker = folder / "manifest.json", folder / "COMPLETE"
        facts = json.loads(path.read_text())
        manifest(facts)
        path.write_text(json.dumps(facts))
        listed = json.loads(marker.read_text())
        listed["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        marker.write_text(json.dumps(listed))
    return folder


def other_torch(facts):
    facts["versions"]["torch"] = "2.1.0"


def flip(folder):
    path = next(folder.glob("iter_*/rank_*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"manifest": other_torch}, r"versions\.torch is '.*' here but '2\.1\.0' in the bundle; use --mode close"),
        ({"manifest": lambda facts: facts.pop("checkpoint")}, r"manifest\.json: has no 'checkpoint'"),
        ({"checkpoint": shutil.rmtree}, r"checkpoint: the state before .* missing"),
        ({"checkpoint": flip}, r"state before the step cannot be read: .*rank_0.*safetensors.*copy step_7\.checkpoint"),
    ],
    ids=["another torch", "no checkpoint named", "checkpoint missing", "checkpoint damaged"],
)
def test_what_keeps_a_step_from_being_replayed_is_named(change, message, bundle, ranks, toolbox, model_dir, tmp_path):
    from miles.data.replay import ReplayError

    folder = damaged(bundle, tmp_path, **change)
    with pytest.raises(ReplayError, match="(?s)" + message):
        ranks(replay(toolbox, model_dir, folder, dp=2), 2)


def test_another_random_state_is_a_difference(bundle, ranks, toolbox, model_dir, monkeypatch):
    from miles.train import replay as module

    monkeypatch.setattr(module, "_random_state", lambda: {"torch": np.zeros(5056, dtype="uint8")})
    report = ranks(replay(toolbox, model_dir, bundle[0], dp=2), 2)[0]
    assert report.differences == ("random state of torch before the step",)

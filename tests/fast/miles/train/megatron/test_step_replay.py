"""One recorded step repeats bit for bit on the same mesh, closely on another, and never silently differs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest


def record(toolbox, model_dir, root, dp=1):
    def body(rank, world, port):
        from miles.train.step_replay import record_step

        backend = toolbox.backend(model_dir, rank, world, port, dp=dp)
        steps = [toolbox.batch(toolbox.samples(seed=seed, ragged=True, off_policy=True), dp=dp) for seed in (0, 1)]
        backend.step(steps[0].for_rank(rank))
        return record_step(backend, steps[1].for_rank(rank), root, step=7, manifest={"recipe": {"name": "test"}})

    return body


def replay(toolbox, model_dir, folder, mode="bit", change=None, **parallel):
    def body(rank, world, port):
        from miles.train.step_replay import replay_step

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
        assert report.differences == ()
        assert report.results == metrics
        assert report.step == 7


def test_replay_on_one_process_is_close(bundle, ranks, toolbox, model_dir):
    report = ranks(replay(toolbox, model_dir, bundle[0], mode="close"), 1)[0]
    assert report.differences == ()


def test_another_mesh_is_named_when_bits_are_asked_for(bundle, ranks, toolbox, model_dir):
    from miles.data.step_bundle import ReplayError

    with pytest.raises(ReplayError, match=r"bit for bit: mesh\.dp is 1 here but 2 in the bundle; use --mode close"):
        ranks(replay(toolbox, model_dir, bundle[0]), 1)


def test_a_changed_optimizer_setting_is_detected(bundle, ranks, toolbox, model_dir):
    def shrink(backend):
        settings = backend.policy.optimizer.config
        backend.policy.optimizer.config = settings.model_copy(update={"lr": settings.lr / 2})

    report = ranks(replay(toolbox, model_dir, bundle[0], change=shrink, dp=2), 2)[0]
    assert report.differences
    assert all("after the step" in text for text in report.differences)


def test_flipped_byte_is_refused_and_named(bundle, ranks, toolbox, model_dir, tmp_path):
    from miles.data.step_bundle import ReplayError

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
    from miles.data.bundle_marker import seal

    folder = tmp_path / "step_7"
    shutil.copytree(bundle[0], folder)
    shutil.copytree(bundle[0].parent / "step_7.checkpoint", tmp_path / "step_7.checkpoint")
    if checkpoint is not None:
        checkpoint(tmp_path / "step_7.checkpoint")
    if manifest is not None:
        path = folder / "manifest.json"
        facts = json.loads(path.read_text())
        manifest(facts)
        path.write_text(json.dumps(facts))
        seal(folder)
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
        (
            {"checkpoint": flip},
            r"^the state before the step cannot be read: \S*rank_0\S*safetensors: expected sha256 \w+, got \w+; the file "
            r"was changed; to replay, copy step_7\.checkpoint beside the bundle again from its source$",
        ),
    ],
    ids=["another torch", "no checkpoint named", "checkpoint missing", "checkpoint damaged"],
)
def test_what_keeps_a_step_from_being_replayed_is_named(change, message, bundle, ranks, toolbox, model_dir, tmp_path):
    from miles.data.step_bundle import ReplayError

    folder = damaged(bundle, tmp_path, **change)
    with pytest.raises(ReplayError, match="(?s)" + message):
        ranks(replay(toolbox, model_dir, folder, dp=2), 2)


def record_diverged(toolbox, model_dir, root, nonfinite, dp=1):
    """Step 1, whose gradient overflows after a step with an absurd learning rate; returns the metrics or the error."""

    def body(rank, world, port):
        from miles.algos.config import AlgoConfig
        from miles.train.errors import TrainError
        from miles.train.step_replay import record_step

        backend = toolbox.backend(model_dir, rank, world, port, dp=dp, lr=1e30, algo=AlgoConfig(nonfinite=nonfinite))
        batch = toolbox.batch(toolbox.samples(), dp=dp).for_rank(rank)
        backend.step(batch)
        try:
            return record_step(backend, batch, root, step=1, manifest={})
        except TrainError as error:
            return str(error)

    return body


def replay_diverged(toolbox, model_dir, folder, nonfinite, mode="bit", **parallel):
    from miles.algos.config import AlgoConfig

    return replay(toolbox, model_dir, folder, mode, algo=AlgoConfig(nonfinite=nonfinite), lr=1e30, **parallel)


def test_a_skipped_step_without_a_finite_gradient_norm_is_reproduced(ranks, toolbox, model_dir, tmp_path):
    metrics = ranks(record_diverged(toolbox, model_dir, tmp_path, "skip_step"), 1)[0]
    assert metrics["train/step_skipped"] == 1.0
    assert np.isnan(metrics["train/grad_norm"])
    for mode in ("bit", "close"):
        report = ranks(replay_diverged(toolbox, model_dir, tmp_path / "step_1", "skip_step", mode), 1)[0]
        assert report.differences == ()


def test_a_failed_step_is_recorded_whole_and_its_failure_reproduced(ranks, toolbox, model_dir, tmp_path):
    from miles.data.step_bundle import load_bundle

    failures = ranks(record_diverged(toolbox, model_dir, tmp_path, "raise", dp=2), 2)
    assert "gradient of step 1 is not finite" in failures[0]
    bundle = load_bundle(tmp_path / "step_1")
    assert bundle.failure is not None
    assert (bundle.failure.kind, bundle.failure.text) == ("TrainError", failures[bundle.failure.rank])
    assert bundle.ranks[1].sha256_before
    assert not bundle.ranks[1].results
    for mode, dp in (("bit", 2), ("close", 1)):
        for report in ranks(replay_diverged(toolbox, model_dir, tmp_path / "step_1", "raise", mode, dp=dp), dp):
            assert report.differences == ()
            assert report.failure.text == failures[0]
    # What goes on here instead of failing is another step.
    for report in ranks(replay_diverged(toolbox, model_dir, tmp_path / "step_1", "skip_step", dp=2), 2):
        assert report.differences == (f"failure: none, recorded {bundle.failure}",)


def test_a_rank_that_fails_alone_closes_the_bundle_and_repeats_its_failure(ranks, toolbox, model_dir, tmp_path):
    from miles.data.step_bundle import load_bundle

    def body(rank, world, port):
        from miles.config import MilesError
        from miles.train.step_replay import record_step

        backend = toolbox.backend(model_dir, rank, world, port, dp=2)
        batch = toolbox.batch(toolbox.samples(), dp=2).for_rank(rank)
        if rank == 1:
            first, *others = batch.micro_batches
            broken = replace(first, advantages=np.full_like(first.advantages, np.nan))
            batch = replace(batch, micro_batches=(broken, *others))
        try:
            record_step(backend, batch, tmp_path, step=1, manifest={})
        except MilesError as error:
            return type(error).__name__, str(error)

    waited, failed = ranks(body, 2)
    assert waited[0] == "TrainError"
    assert "another rank died" in waited[1]
    failure = load_bundle(tmp_path / "step_1").failure
    assert (failure.rank, failure.kind, failure.text) == (1, *failed)
    assert failure.text.startswith("sample 's")
    assert "advantage nan" in failure.text
    report = ranks(replay(toolbox, model_dir, tmp_path / "step_1", dp=2), 2)[1]
    assert report.differences == ()
    assert report.failure == failure


def test_another_failure_is_a_difference_where_it_was_recorded():
    from miles.data.step_bundle import StepFailure
    from miles.train.step_replay import _failure_differences

    recorded = StepFailure(1, "NonFiniteError", "sample 'a'")
    other = StepFailure(1, "NonFiniteError", "sample 'b'")
    elsewhere = StepFailure(0, "NonFiniteError", "sample 'c'")
    assert _failure_differences(other, recorded, 1, "bit")
    assert not _failure_differences(other, recorded, 1, "close")
    assert not _failure_differences(elsewhere, recorded, 0, "bit")
    assert _failure_differences(StepFailure(1, "KeyError", "sample 'a'"), recorded, 1, "close")


def test_a_missing_result_is_not_a_result_without_a_number():
    from miles.train.step_replay import _result_differences

    name = "train/grad_norm"
    assert not _result_differences({name: np.nan}, {name: np.nan}, "bit", "fp32")
    assert _result_differences({name: np.nan}, {}, "bit", "fp32") == ["train/grad_norm: nan, recorded None"]
    assert _result_differences({name: 1.0}, {name: np.nan}, "close", "fp32")


def test_another_random_state_is_a_difference(bundle, ranks, toolbox, model_dir, monkeypatch):
    from miles.train import step_replay as module

    monkeypatch.setattr(module, "_random_state", lambda: {"torch": np.zeros(5056, dtype="uint8")})
    report = ranks(replay(toolbox, model_dir, bundle[0], dp=2), 2)[0]
    assert report.differences == ("random state of torch before the step",)

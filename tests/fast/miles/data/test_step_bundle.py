from __future__ import annotations

import json
import threading
from dataclasses import fields

import numpy as np
import pytest

from miles.data.batch import MicroBatch, build_batch
from miles.data.batch_layout import BatchLayout
from miles.data.bundle_marker import ReplayError, seal
from miles.data.counting import count_rollouts
from miles.data.sampling_mask import RolloutSamplingMask
from miles.data.schedule import ScheduleConfig, build_dp_schedule
from miles.data.step_bundle import (
    RankRecord,
    StepFailure,
    array_sha256,
    finish_failed_bundle,
    load_bundle,
    open_bundle,
    write_rank,
)


@pytest.fixture
def bundle(make_sample, write_bundle, tmp_path):
    samples = [
        make_sample(
            4,
            rollout_log_probs=np.linspace(-1, -0.1, 4, dtype=np.float32),
            sampling_mask=RolloutSamplingMask.from_rows([[5, 1], [6], [7, 2], [8]], vocab_size=16).with_ref_log_probs(
                np.log(np.array([0.5, 0.5, 1, 0.25, 0.75, 1], dtype=np.float32))
            ),
        )
        for _ in range(5)
    ]
    counted = count_rollouts(samples)
    plan = build_dp_schedule([7] * 5, range(5), ScheduleConfig(data_parallel=2, max_tokens_per_gpu=14))
    batch = build_batch(
        samples, plan.steps[0], counted, layout=BatchLayout("thd", pad_id=1, pad_multiple=4, use_support=True)
    )
    records = {
        rank: RankRecord(
            batch.for_rank(rank),
            rng={"torch": np.arange(16, dtype=np.uint8)},
            sha256_before={"w": array_sha256(np.ones(3))},
            sha256_after={"w": array_sha256(np.zeros(3))},
            results={"train/loss": 0.1 + 0.2, "train/grad_norm": 1e-30},
        )
        for rank in (0, 1)
    }
    folder = write_bundle(tmp_path, 12, {"seed": 3, "weight_version": 12}, records)
    return folder, records


def test_replay_bit_equal_and_tamper_refused(bundle):
    folder, records = bundle
    loaded = load_bundle(folder)
    assert loaded.manifest == {"schema": 3, "step": 12, "seed": 3, "weight_version": 12}
    for rank, record in records.items():
        again = loaded.ranks[rank]
        assert again.results == record.results
        assert again.sha256_before == record.sha256_before
        assert again.batch.denominators == record.batch.denominators
        np.testing.assert_array_equal(again.rng["torch"], record.rng["torch"])
        for mine, theirs in zip(again.batch.micro_batches, record.batch.micro_batches, strict=True):
            for item in fields(MicroBatch):
                left, right = getattr(mine, item.name), getattr(theirs, item.name)
                if isinstance(right, np.ndarray):
                    assert left.dtype == right.dtype
                    assert left.tobytes() == right.tobytes(), item.name
                else:
                    assert left == right, item.name
    assert len(list(folder.iterdir())) == 6
    for path in [*sorted(folder.glob("*.safetensors")), folder / "manifest.json", folder / "rank_1.json"]:
        original = path.read_bytes()
        flipped = bytearray(original)
        flipped[len(flipped) // 2] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(ReplayError, match=f"{path.name}: content changed"):
            load_bundle(folder)
        path.write_bytes(original)
    load_bundle(folder)


def test_a_bundle_without_its_marker_or_a_file_is_refused(bundle):
    folder, _ = bundle
    (folder / "rank_1.safetensors").rename(folder / "elsewhere")
    with pytest.raises(ReplayError, match=r"rank_1\.safetensors: missing"):
        load_bundle(folder)
    (folder / "COMPLETE").unlink()
    with pytest.raises(ReplayError, match="never finished"):
        load_bundle(folder)


def test_every_flipped_bit_of_the_marker_is_blamed_on_the_marker(bundle):
    folder, _ = bundle
    path = folder / "COMPLETE"
    original = path.read_bytes()
    listed = json.loads(original)
    for position in range(len(original)):
        flipped = bytearray(original)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        try:
            changed = json.loads(flipped.decode()) != listed
        except ValueError:
            changed = True
        if not changed:
            continue
        with pytest.raises(ReplayError, match=r"COMPLETE: .*; copy the bundle again from its source"):
            load_bundle(folder)


@pytest.mark.parametrize(
    "names", [("rank_1.json", "rank_1.safetensors"), ("rank_0.safetensors",), ("rank_0.json",), ("manifest.json",)]
)
def test_a_bundle_without_every_file_of_every_rank_is_refused(bundle, write_bundle, names):
    folder, records = bundle
    mesh = {"tp": 1, "pp": 1, "cp": 1, "dp": 2}
    folder = write_bundle(folder.parent, 13, {"mesh": mesh}, records)
    load_bundle(folder)
    marker = json.loads((folder / "COMPLETE").read_text())
    for name in names:
        del marker["sha256"][name]
    (folder / "COMPLETE").write_text(json.dumps(marker))
    with pytest.raises(ReplayError, match="COMPLETE: content changed"):
        load_bundle(folder)
    # Nor when the list was made without them.
    for name in names:
        (folder / name).unlink()
    seal(folder)
    with pytest.raises(
        ReplayError, match=r"does not list .*; copy|recorded by 2 ranks, but holds the files of 1; copy"
    ):
        load_bundle(folder)


def test_a_folder_that_is_no_bundle_says_where_one_is(bundle, tmp_path):
    folder, _ = bundle
    with pytest.raises(ReplayError, match=r"nowhere: no such folder; give a step_<n> folder"):
        load_bundle(tmp_path / "nowhere")
    with pytest.raises(ReplayError, match=r"manifest\.json: not a folder"):
        load_bundle(folder / "manifest.json")
    with pytest.raises(ReplayError, match=r"not itself a bundle; give one of .*/step_12$"):
        load_bundle(folder.parent)


def test_a_run_folder_names_the_later_optimizer_steps_too(bundle, write_bundle, tmp_path):
    _, records = bundle
    for step in (2, 10):
        write_bundle(tmp_path / "run/replay", step, {}, records)
    for number in (1, 2):
        write_bundle(tmp_path / f"run/replay/optimizer_step_{number}", 2, {}, records)
    places = ("step_2", "step_10", "optimizer_step_1/step_2", "optimizer_step_2/step_2")
    with pytest.raises(ReplayError) as caught:
        load_bundle(tmp_path / "run")
    assert str(caught.value).endswith("give one of " + ", ".join(f"{tmp_path}/run/replay/{place}" for place in places))


@pytest.mark.parametrize("text", ["[]", '{"schema": 3}', '{"schema": 3, "sha256": []}', '{"schema": 3, "sha256": {}}'])
def test_a_marker_that_lists_no_files_is_refused(bundle, text):
    folder, _ = bundle
    (folder / "COMPLETE").write_text(text)
    with pytest.raises(ReplayError, match=r"COMPLETE: .*copy the bundle again"):
        load_bundle(folder)


def test_a_file_that_was_put_beside_the_bundle_is_refused(bundle):
    folder, _ = bundle
    (folder / ".DS_Store").touch()
    assert sorted(load_bundle(folder).ranks) == [0, 1]
    (folder / "rank_7.json").write_text("{}")
    with pytest.raises(ReplayError, match=r"rank_7\.json: not one of the files that COMPLETE lists; remove it"):
        load_bundle(folder)


def test_a_bundle_of_another_schema_is_refused(bundle, monkeypatch):
    folder, _ = bundle
    monkeypatch.setattr("miles.data.bundle_marker.SCHEMA", 9)
    seal(folder)
    monkeypatch.undo()
    with pytest.raises(ReplayError, match="schema 9, this program reads 3"):
        load_bundle(folder)


def test_of_ranks_that_fail_at_once_one_closes_the_bundle_and_the_others_wait(bundle, tmp_path):
    _, records = bundle
    unfinished = open_bundle(tmp_path / "failed", 3)
    for rank, record in records.items():
        write_rank(unfinished, rank, record)
    closed = []

    def fail(rank):
        failure = StepFailure.of(rank, ValueError("too large"))
        finish_failed_bundle(unfinished, {"step": 3}, failure, wait_s=10.0)
        closed.append(load_bundle(tmp_path / "failed/step_3").failure)

    threads = [threading.Thread(target=fail, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(closed) == 4
    assert len(set(closed)) == 1
    assert closed[0].kind == "ValueError"
    assert [path.name for path in (tmp_path / "failed").iterdir()] == ["step_3"]


def test_an_unfinished_bundle_is_replaced(tmp_path):
    first = open_bundle(tmp_path, 1)
    (first / "leftover").touch()
    (tmp_path / "step_1.closing").mkdir()
    assert list(open_bundle(tmp_path, 1).iterdir()) == []
    assert list(tmp_path.iterdir()) == [first]


def test_the_hash_tells_dtype_and_shape_apart():
    zeros = np.zeros(4, dtype=np.float32)
    hashes = {array_sha256(zeros), array_sha256(zeros.reshape(2, 2)), array_sha256(zeros.astype(np.int32))}
    assert len(hashes) == 3

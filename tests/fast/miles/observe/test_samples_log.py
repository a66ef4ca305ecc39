"""`samples.jsonl`: what a line says, what rotates out, what a kill and a resume leave."""

from __future__ import annotations

import json
import math
import resource
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.data.sample import Sample, Status
from miles.observe.config import SamplesConfig
from miles.observe.samples_log import SamplesLog, read_samples, rewind


class Letters:
    """Token n is the n-th letter of the alphabet, 0 is special."""

    def decode(self, ids: np.ndarray, *, skip_special: bool = True) -> str:
        return "".join("<end>" if i == 0 else chr(96 + i) for i in ids.tolist() if i or not skip_special)


def sample(number: int, group: int, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "tokens": np.array([1, 2, 3, 4, 0]),
        "prompt_length": 2,
        "loss_mask": np.array([1, 0, 1], dtype=np.uint8),
        "rollout_log_probs": np.array([-0.5, -100.0, -0.25], dtype=np.float32),
        "version_spans": np.array([[3, 1], [-1, 1], [2, 1]]),
        "reward": 0.5,
        "reward_parts": {"format": 0.25},
        "status": Status.COMPLETED,
    }
    return Sample(f"s{number}", group, number, **{**values, **changes})


def groups(count: int, size: int = 2) -> list[Sample]:
    return [sample(size * group + i, group) for group in range(count) for i in range(size)]


def opened(folder: Path, warnings: list[str] | None = None, **config: Any) -> Any:
    told: Any = pytest.fail if warnings is None else warnings.append
    return closing(SamplesLog(folder, SamplesConfig(**config), Letters(), told))


def steps(folder: Path) -> list[int]:
    records, damaged = read_samples(folder)
    assert damaged == 0
    return [record["step"] for record in records]


def test_a_line_says_what_was_asked_written_and_judged(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        log.append(7, [sample(1, 5)])
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 7,
        "group": 5,
        "sample": "s1",
        "prompt": "ab",
        "completion": "cd<end>",
        "reward": 0.5,
        "reward_parts": {"format": 0.25},
        "log_prob_sum": -0.75,  # without the token that the policy did not write
        "tokens": 3,
        "weight_versions": [2, 3],
        "status": "completed",
    }


def test_what_nobody_measured_is_null_and_numbers_that_json_lacks_are_words(tmp_path: Path) -> None:
    infinite = np.array([-math.inf, 0, 0], dtype=np.float32)
    bare = {"reward": None, "rollout_log_probs": None, "version_spans": None, "status": Status.FAILED}
    with opened(tmp_path) as log:
        log.append(0, [sample(0, 0, rollout_log_probs=infinite), sample(1, 0, **bare)])
    (first, second), _ = read_samples(tmp_path)
    assert first["log_prob_sum"] == "-Infinity"
    assert (second["reward"], second["log_prob_sum"], second["weight_versions"]) == (None, None, [])


@pytest.mark.parametrize(("count", "shown"), [(0, 0), (1, 1), (2, 2), ("all", 5)])
def test_as_many_groups_of_a_step_as_asked_each_whole(tmp_path: Path, count: Any, shown: int) -> None:
    mixed = [member for pair in zip(groups(5)[::2], groups(5)[1::2], strict=True) for member in pair]
    spread = mixed[::2] + mixed[1::2]
    with opened(tmp_path, groups=count) as log:
        log.append(0, spread)
    records, _ = read_samples(tmp_path)
    assert sorted(record["group"] for record in records) == sorted([*range(shown)] * 2)
    assert (tmp_path / "samples.jsonl").exists() == bool(count)


def test_long_text_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    tokens = np.array([1] * 200 + [2] * 200)
    long = sample(0, 0, tokens=tokens, prompt_length=1, loss_mask=None, rollout_log_probs=None, version_spans=None)
    with opened(tmp_path, max_chars=100) as log:
        log.append(0, [long])
    ((record,), _) = read_samples(tmp_path)
    assert record["completion"] == "a" * 50 + "[... 299 characters left out ...]" + "b" * 50


def test_files_stay_in_their_bound_and_hold_the_newest_steps(tmp_path: Path) -> None:
    with opened(tmp_path, max_mib=0.01) as log:
        for step in range(200):
            log.append(step, groups(2))
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.1.jsonl", "samples.jsonl"]
    assert 5000 < total <= 0.01 * (1 << 20)
    found = steps(tmp_path)
    assert found == sorted(found)
    assert found[-1] == 199
    assert [found.count(step) for step in set(found)] == [4] * len(set(found))


def test_a_step_above_the_bound_is_told_once_and_writes_nothing(tmp_path: Path) -> None:
    warnings: list[str] = []
    with opened(tmp_path, warnings, max_mib=0.01, groups="all") as log:
        log.append(0, groups(1))
        for step in (1, 2):
            log.append(step, groups(40))
    (warning,) = warnings
    assert "samples.jsonl: no more samples are written: those of a step take" in warning
    assert "observe.samples.max_mib" in warning
    assert steps(tmp_path) == [0, 0]


@contextmanager
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_step_that_does_not_fit_on_the_disk_leaves_no_part_and_costs_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    with opened(tmp_path, warnings) as log, small_files():
        for step in range(4):
            log.append(step, groups(1))
            log.sync()
    assert steps(tmp_path) == [0, 0, 1, 1]
    assert len(warnings) == 1
    assert warnings[0].endswith("File too large; the run goes on")


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    with opened(tmp_path / "missing", warnings) as log:
        log.append(0, groups(1))
        log.append(1, groups(1))
        log.sync()
    assert len(warnings) == 1


def test_resume_drops_what_a_kill_cut_and_what_lies_beyond_the_checkpoint(tmp_path: Path) -> None:
    with opened(tmp_path, max_mib=0.01) as log:
        for step in range(12):
            log.append(step, groups(2))
    assert (tmp_path / "samples.1.jsonl").exists()
    newest = tmp_path / "samples.jsonl"
    newest.write_bytes(newest.read_bytes()[:-9])
    kept = [step for step in steps(tmp_path) if step < 10]
    rewind(tmp_path, first_dropped_step=10, warn=pytest.fail)
    assert steps(tmp_path) == kept
    with opened(tmp_path, max_mib=0.01) as log:
        for step in (10, 11):
            log.append(step, groups(2))
    found = steps(tmp_path)
    assert found[-8:] == [10] * 4 + [11] * 4
    assert [found.count(step) for step in set(found)] == [4] * len(set(found))


def test_resume_after_a_kill_between_the_two_files_and_without_any(tmp_path: Path) -> None:
    rewind(tmp_path, first_dropped_step=0, warn=pytest.fail)
    assert list(tmp_path.iterdir()) == []
    with opened(tmp_path) as log:
        log.append(0, groups(1))
    (tmp_path / "samples.jsonl").rename(tmp_path / "samples.1.jsonl")
    rewind(tmp_path, first_dropped_step=1, warn=pytest.fail)
    assert steps(tmp_path) == [0, 0]


def test_lines_that_hold_no_sample_are_counted_and_passed_over(tmp_path: Path) -> None:
    good = '{"step": 3}'
    bad = ["", "[1]", '{"step": true}', '{"step": "3"}', "\udcff", "[" * 100_000, '{"step": ' + "9" * 5000 + "}"]
    text = "\n".join([good, *bad, good, '{"step": 4'])
    (tmp_path / "samples.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    assert read_samples(tmp_path) == ([{"step": 3}, {"step": 3}], len(bad))
    rewind(tmp_path, first_dropped_step=4, warn=pytest.fail)
    assert read_samples(tmp_path) == ([{"step": 3}, {"step": 3}], 0)


def test_a_resume_that_cannot_rewrite_warns_and_leaves_the_file(tmp_path: Path) -> None:
    with opened(tmp_path, groups="all") as log:
        log.append(0, groups(4))
    before = (tmp_path / "samples.jsonl").read_bytes()
    warnings: list[str] = []
    with small_files():
        rewind(tmp_path, first_dropped_step=1, warn=warnings.append)
    (warning,) = warnings
    assert warning.startswith("samples of later steps could not be removed: ")
    assert "the limit on file sizes is reached" in warning
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]

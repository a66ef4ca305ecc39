"""The kept checkpoint: the best so far is whole at every moment, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.config import ConfigError
from miles.evaluate import best


def keep(directory: Path, step: int, value: float) -> best.Best:
    temporary = best.begin(directory, step)
    for name in ("checkpoints", "hf_model"):
        (temporary / name).mkdir()
        (temporary / name / "weights").write_text(f"{step}")
    return best.publish(temporary, step=step, metric="eval/a/reward_mean", value=value)


def test_a_better_one_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    assert best.read_best(tmp_path / "best") is None
    keep(tmp_path / "best", 5, 0.25)
    keep(tmp_path / "best", 10, 0.5)
    found = best.read_best(tmp_path / "best")
    assert found is not None
    assert (found.step, found.metric, found.value) == (10, "eval/a/reward_mean", 0.5)
    assert (found.exported_model / "weights").read_text() == "10"
    assert found.checkpoint == tmp_path / "best" / "step_10" / "checkpoints" / "iter_10"
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step_10"]


def test_equal_values_and_numbers_that_are_none_are_not_better(tmp_path: Path) -> None:
    kept = keep(tmp_path / "best", 5, 0.25)
    assert [best.is_better(value, kept) for value in (0.25, 0.24, float("nan"), float("inf"), 0.26)] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert best.is_better(-1.0, None)
    assert not best.is_better(float("nan"), None)


class Killed(BaseException):
    """The process ends here: nothing after it runs."""


OPERATIONS = [(os, "replace"), (Path, "rename"), (shutil, "rmtree"), (Path, "mkdir"), (os, "fsync")]


def dies_after(patch: pytest.MonkeyPatch, count: int) -> None:
    """Of the operations on the disk, `count` are done and no other."""
    numbers = iter(range(count))

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            if next(numbers, None) is None:
                raise Killed
            return original(*arguments, **options)

        return operation

    for owner, name in OPERATIONS:
        patch.setattr(owner, name, dying(getattr(owner, name)))


@pytest.mark.parametrize("same_step", [False, True])
def test_a_kill_at_any_moment_leaves_a_whole_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_step: bool
) -> None:
    step, survived = (5 if same_step else 10), []
    for moment in range(100):
        directory = tmp_path / str(moment) / "best"
        directory.parent.mkdir()
        keep(directory, 5, 0.25)
        with monkeypatch.context() as patch:
            dies_after(patch, moment)
            try:
                keep(directory, step, 0.5)
                done = True
            except Killed:
                done = False
        found = best.read_best(directory)
        assert found is not None
        assert found.value in (0.25, 0.5)
        assert (found.exported_model / "weights").read_text() == str(5 if found.value == 0.25 else step)
        survived.append(found.value)
        # The next life of the run clears what was left and may keep a better one.
        assert keep(directory, 15, 0.75) == best.read_best(directory)
        assert [path.name for path in directory.iterdir()] == ["step_15"]
        if done:
            break
    assert done
    assert set(survived) == {0.25, 0.5}


def test_what_a_killed_life_had_begun_is_begun_anew(tmp_path: Path) -> None:
    (best.begin(tmp_path / "best", 5) / "half").write_text("")
    (best.begin(tmp_path / "best", 10) / "half").write_text("")
    assert list(best.begin(tmp_path / "best", 10).iterdir()) == []
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step_10.tmp"]


def test_a_changed_record_is_refused(tmp_path: Path) -> None:
    kept = keep(tmp_path / "best", 5, 0.25)
    (kept.path / best.RECORD).write_text('{"schema": 2}')
    with pytest.raises(ConfigError, match=r"step_5/best\.json: does not say which checkpoint this is .*move .* away"):
        best.read_best(tmp_path / "best")

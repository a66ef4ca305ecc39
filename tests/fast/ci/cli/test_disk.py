"""What the commands do when paths are wrong, disks are full and trees hold odd things."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_ci.errors import ExitCode
from tests.fast.ci.helpers.trees import PLAIN, REPOSITORY


def test_a_path_that_cannot_be_written_is_told_without_a_traceback(run, tree: Path) -> None:
    (tree / "file").write_text("")
    code, _, err = run("plan", "--out", str(tree / "file/plan.json"))
    assert (code, err.startswith("miles-ci plan: "), str(tree / "file") in err) == (2, True, True)


def test_a_full_disk_is_the_machines_fault(run, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = run("plan", "--out", str(tree / "plan.json"))
    assert (code, "No space left on device" in err) == (ExitCode.INFRA, True)
    assert not (tree / "plan.json").exists()
    assert [path.name for path in tree.glob(".plan-*")] == []


def test_a_link_to_tests_is_an_error_since_nothing_behind_it_runs(run, tree: Path) -> None:
    (tree / "elsewhere").mkdir()
    (tree / "elsewhere/test_far.py").write_text(PLAIN)
    (tree / "tests/fast/test_far.py").symlink_to(tree / "elsewhere/test_far.py")
    (tree / "tests/fast/far").symlink_to(tree / "elsewhere")
    (tree / "tests/fast/helpers").mkdir()
    (tree / "tests/fast/helpers/test_far.py").symlink_to(tree / "elsewhere/test_far.py")
    code, out, _ = run("lint")
    assert code == 2
    for path in ("tests/fast/far", "tests/fast/test_far.py", "tests/fast/helpers/test_far.py"):
        assert f"{path}:1:1: error[symbolic-link] a symbolic link is not followed" in out


def test_the_scan_leaves_nothing_in_the_tree(run, tree: Path, cache: Path) -> None:
    before = sorted(tree.rglob("*"))
    run("list")
    run("lint")
    assert sorted(tree.rglob("*")) == before
    assert {path.name.partition("-")[0] for path in cache.iterdir()} == {"scan", "syntax"}


@pytest.mark.parametrize("words", [["--help"], ["list"], ["lint"]])
def test_a_reader_that_goes_away_is_neither_a_traceback_nor_a_success(
    tree: Path, cache: Path, words: list[str]
) -> None:
    """`miles-ci list | head -1`"""
    read, write = os.pipe()
    os.close(read)
    place = [] if words == ["--help"] else ["--root", str(tree)]
    done = subprocess.run(
        [sys.executable, "-m", "miles_ci", *words, *place], cwd=REPOSITORY, stdout=write, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "MILES_CI_CACHE_DIR": str(cache)}, check=False,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (ExitCode.INTERRUPTED, "")

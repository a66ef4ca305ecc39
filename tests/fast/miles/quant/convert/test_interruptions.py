"""Kill -9 at any point, and a full disk: what is there is whole, and a resume gives the same bytes."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.quant.convert.mxfp4_to_fp8 import convert
from miles.quant.convert.shards import ShardWriter

POINTS = 20


def in_child(work) -> int:
    """Fork (torch is loaded already), run, return the wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(7)
    return pid


def arm(steps: int, count: Callable[[], None] = lambda: None) -> None:
    """In a child: die at the given step, where a step is the start or the end of a write, an fsync or a rename."""
    left = [steps]

    def tick() -> None:
        count()
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            tick()
            result = original(*arguments, **options)
            tick()
            return result

        setattr(owner, name, watched)

    for owner, name in (
        (ShardWriter, "write"),
        (os, "fsync"),
        (os, "replace"),
        (Path, "replace"),
        (shutil, "copyfile"),
    ):
        watch(owner, name)


def steps_of(work: Callable[[], object], tmp_path: Path) -> int:
    """How many steps a whole run of `work` has."""
    marks = tmp_path / "marks"

    def counted() -> None:
        total = [0]
        arm(-1, lambda: total.__setitem__(0, total[0] + 1))
        work()
        marks.write_text(str(total[0]))

    os.waitpid(in_child(counted), 0)
    return int(marks.read_text())


def killed_at(step: int, work: Callable[[], object]) -> bool:
    def armed() -> None:
        arm(step)
        work()

    _, status = os.waitpid(in_child(armed), 0)
    return os.WIFSIGNALED(status)


def test_kill9_resume_same_bytes(mxfp4_checkpoint, tmp_path: Path, digest) -> None:
    source = mxfp4_checkpoint(layers=4, m=384, n=512)
    convert(source, tmp_path / "whole")
    want = digest(tmp_path / "whole")
    total = steps_of(lambda: convert(source, tmp_path / "counted"), tmp_path)
    assert total > 100
    for step in random.Random(0).sample(range(1, total + 1), POINTS):
        target = tmp_path / f"killed{step}"
        assert killed_at(step, lambda target=target: convert(source, target)), step
        if not (target / "COMPLETE").exists():
            convert(source, target, resume=True)
        assert digest(target) == want, f"step {step} of {total}"


def test_killed_again_and_again_still_resumes(mxfp4_checkpoint, tmp_path: Path, digest) -> None:
    source, target = mxfp4_checkpoint(layers=4, m=384, n=512), tmp_path / "out"
    convert(source, tmp_path / "whole")
    total = steps_of(lambda: convert(source, tmp_path / "counted"), tmp_path)
    rng, deaths = random.Random(1), 0
    while killed_at(rng.randrange(1, total), lambda: convert(source, target, resume=True)):
        deaths += 1
        assert deaths < 50, "runs that resume never come to an end"
    assert deaths >= 2
    assert (target / "COMPLETE").exists()
    assert digest(target) == digest(tmp_path / "whole")


def test_a_cut_off_journal_line_is_dropped(mxfp4_checkpoint, tmp_path: Path, digest) -> None:
    source, target = mxfp4_checkpoint(), tmp_path / "out"
    convert(source, tmp_path / "whole")
    convert(source, target)
    (target / "COMPLETE").unlink()
    journal = target / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:2]) + lines[2][: len(lines[2]) // 2])
    convert(source, target, resume=True)
    assert digest(target) == digest(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_a_finished_shard_that_was_damaged_since_is_written_again(
    damage: str, mxfp4_checkpoint, tmp_path: Path, digest
) -> None:
    source, target = mxfp4_checkpoint(), tmp_path / "out"
    convert(source, tmp_path / "whole")
    convert(source, target)
    (target / "COMPLETE").unlink()
    shard = target / "model-1.safetensors"
    if damage == "lost":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    convert(source, target, resume=True)
    assert digest(target) == digest(tmp_path / "whole")


def test_disk_full_leaves_no_final(mxfp4_checkpoint, tmp_path: Path, digest) -> None:
    """Writing stops at 40 kB a file: the shard does not appear, nothing is COMPLETE, and a resume finishes."""
    source, target = mxfp4_checkpoint(m=384, n=512), tmp_path / "out"

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        convert(source, target)

    _, status = os.waitpid(in_child(limited), 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert not list(target.glob("*.safetensors"))
    assert not list(target.glob("*.tmp"))
    assert not (target / "COMPLETE").exists()
    convert(source, target, resume=True)
    convert(source, tmp_path / "whole")
    assert digest(target) == digest(tmp_path / "whole")

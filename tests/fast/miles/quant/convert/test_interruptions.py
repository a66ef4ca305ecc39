"""Kill -9 at any point, and a full disk: what is there is whole, and a resume gives the same bytes."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from pathlib import Path

from miles.quant.convert.mxfp4_to_fp8 import convert

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


def test_kill9_resume_same_bytes(mxfp4_checkpoint, tmp_path: Path, digest) -> None:
    source = mxfp4_checkpoint(layers=4, m=384, n=512)
    convert(source, tmp_path / "whole")
    started = time.monotonic()
    convert(source, tmp_path / "warm")
    duration = time.monotonic() - started
    want = digest(tmp_path / "whole")
    rng, killed = random.Random(0), 0
    for point in range(POINTS):
        target = tmp_path / f"killed{point}"
        pid = in_child(lambda target=target: convert(source, target))
        time.sleep(duration * rng.random())
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        killed += os.WIFSIGNALED(status)
        if (target / "COMPLETE").exists():
            assert digest(target) == want
            continue
        convert(source, target, resume=target.exists())
        assert digest(target) == want, f"point {point}"
    assert killed >= POINTS // 2, "the children must die in the middle of the work"


def test_killed_twice_still_resumes(mxfp4_checkpoint, tmp_path: Path, digest) -> None:
    source = mxfp4_checkpoint(layers=4, m=384, n=512)
    convert(source, tmp_path / "whole")
    target = tmp_path / "out"
    for seed in range(3):
        if (target / "COMPLETE").exists():
            break
        pid = in_child(lambda: convert(source, target, resume=target.exists()))
        time.sleep(0.01 + 0.01 * seed)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not (target / "COMPLETE").exists():
        convert(source, target, resume=target.exists())
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

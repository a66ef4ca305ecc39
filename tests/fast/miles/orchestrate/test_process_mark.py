"""Who belongs to a run: by mark, by folder, by descent, by session, by having been seen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles.orchestrate.process_mark import VARIABLE, Process, members, processes

FOLDER = "/tmp/miles-ray-x"


class Proc:
    """A made-up /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self, pid: int, *, name="python", arguments=(), mark=None, parent=1, session=1, started=10, state="S", files=()
    ):
        entry = self.root / str(pid)
        (entry / "fd").mkdir(parents=True)
        fields = [state, parent, pid, session, *[0] * 15, started, *[0] * 10]
        (entry / "stat").write_text(f"{pid} (a) b (c) {' '.join(map(str, fields))}\n")
        (entry / "cmdline").write_bytes(
            b"\0".join([f"/usr/bin/{name}".encode(), *[a.encode() for a in arguments], b""])
        )
        (entry / "environ").write_bytes(b"A=1\0" + (f"{VARIABLE}={mark}\0".encode() if mark else b""))
        for number, target in enumerate(files):
            (entry / "fd" / str(number)).symlink_to(target)

    def found(self, **options) -> list[int]:
        return sorted(process.pid for process in members("m", FOLDER, proc=self.root, **options))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    (tmp_path / "self").mkdir()
    return Proc(tmp_path)


def test_the_mark_is_compared_whole(proc: Proc) -> None:
    proc.add(101, mark="m")
    proc.add(102, mark="mm")
    proc.add(103, mark="x")
    proc.add(104)
    assert proc.found() == [101]


def test_only_programs_of_python_and_ray_belong_by_the_folder(proc: Proc) -> None:
    proc.add(101, arguments=[f"--dir={FOLDER}/session"])
    proc.add(102, name="raylet", arguments=[f"{FOLDER}/socket"])
    proc.add(103, name="tail", arguments=[f"{FOLDER}/log"])
    proc.add(104, files=[f"{FOLDER}/r/session/logs/agent.log"])
    proc.add(105, name="tail", files=[f"{FOLDER}/r/session/logs/agent.log"])
    proc.add(106, files=[f"{FOLDER}y/log", "/dev/null"])
    assert proc.found() == [101, 102, 104]
    assert proc.found(open_files=False) == [101, 102]


def test_descendants_and_sessions_of_members_belong(proc: Proc) -> None:
    proc.add(103, parent=102)
    proc.add(102, parent=101)
    proc.add(101, mark="m")
    proc.add(104, session=101)
    proc.add(105, session=99)
    assert proc.found() == [101, 102, 103, 104]


def test_who_was_seen_stays_a_member_and_a_process_id_given_again_does_not(proc: Proc) -> None:
    proc.add(101, started=10, parent=77)
    proc.add(102, started=11)
    seen = {Process(101, 10, parent=5, session=5), Process(102, 10, parent=5, session=5)}
    assert proc.found(seen=seen) == [101]


def test_zombies_this_process_and_who_is_left_out_are_no_members(proc: Proc) -> None:
    proc.add(101, mark="m", state="Z")
    proc.add(os.getpid(), mark="m")
    proc.add(102, mark="m", started=3)
    proc.add(103, parent=102)
    assert proc.found(without={Process(102, 3, parent=1, session=1)}) == []
    assert proc.found(without={Process(102, 4, parent=1, session=1)}) == [102, 103]


def test_processes_that_end_meanwhile_are_passed_over(proc: Proc) -> None:
    proc.add(101, mark="m")
    (proc.root / "102").mkdir()
    assert proc.found() == [101]


def test_the_real_table_holds_this_process_with_its_parent_and_session() -> None:
    mine = processes()[os.getpid()]
    assert (mine.parent, mine.session) == (os.getppid(), os.getsid(0))

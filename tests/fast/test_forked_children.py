"""What the test suite's own settings promise to tests that fork."""

from __future__ import annotations

import gc
import os


class _Cycle:
    """Garbage that only the cyclic collector finds."""

    def __init__(self, note: list[int]) -> None:
        self.self, self.note = self, note

    def __del__(self) -> None:
        self.note.append(os.getpid())


def test_a_forked_child_never_collects_its_parents_garbage() -> None:
    note: list[int] = []
    gc.disable()
    try:
        _Cycle(note)
        pid = os.fork()
        if pid == 0:
            gc.collect()
            os._exit(len(note))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        gc.enable()
    gc.collect()
    assert note == [os.getpid()]

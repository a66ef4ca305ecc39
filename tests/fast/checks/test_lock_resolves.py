"""The real lock against the real package index, for every supported Python and processor."""

from __future__ import annotations

import pytest

from checks import lock
from miles_ci.declare import register_cpu_ci

register_cpu_ci(120, "stage-a-cpu", nightly=True)


@pytest.mark.timeout(900)
def test_the_lock_resolves_from_wheels_alone_for_every_supported_machine() -> None:
    said: list[str] = []
    assert list(lock.faults(lock.resolve, said.append)) == []
    assert len(said) == 2 * len(lock.PYTHONS) * len(lock.LINUX) + len(lock.ELSEWHERE)

"""What the check of the lock says when a package is missing, not pinned, or has come where we say there is none."""

from __future__ import annotations

import pytest

from checks import lock
from checks.lock import ABSENT, CONSTRAINTS, LINUX, MAC, PYTHONS, SOURCE_ONLY, Answer, read_pins
from miles_ci.declare import register_cpu_ci

register_cpu_ci(3, "stage-a-cpu")

PINNED = read_pins(CONSTRAINTS.read_text())


def index(*, python: str = "", platform: str = "", answer: Answer | None = None, everywhere: bool = False):
    """A package index as it is said to be; `answer` is given for one machine instead. Notes who asked for what."""
    asked = []

    def resolver(wanted, on_python, on_platform, from_source) -> Answer:
        asked.append((on_python, on_platform, tuple(from_source)))
        if (on_python, on_platform) == (python, platform) and answer is not None:
            return answer
        supported = on_python in PYTHONS and on_platform in LINUX
        if any(line.startswith(ABSENT) for line in wanted) and not (supported or everywhere):
            return Answer({}, f"{ABSENT} has no usable wheels")
        return Answer({"numpy": PINNED["numpy"]}, "")

    return resolver, asked


def test_every_pair_is_asked_and_only_extras_may_take_sources() -> None:
    resolver, asked = index()
    assert list(lock.faults(resolver, lambda _: None)) == []
    assert len({(python, platform) for python, platform, _ in asked if python != "3.14" and platform != MAC}) == 6
    assert {sources for *_, sources in asked} == {(), SOURCE_ONLY}


def test_a_pair_that_does_not_resolve_is_named_with_the_resolvers_words() -> None:
    resolver, _ = index(python="3.12", platform=LINUX[1], answer=Answer({}, "ray==9 has no wheels"))
    found = list(lock.faults(resolver, lambda _: None))
    assert found == [f"Python 3.12, {LINUX[1]}, {what}: ray==9 has no wheels" for what in ("quickstart", "every extra")]


def test_a_package_without_a_pin_is_named() -> None:
    resolver, _ = index(python="3.13", platform=LINUX[0], answer=Answer({"left-pad": "1.0"}, ""))
    found = list(lock.faults(resolver, lambda _: None))
    assert len(found) == 2
    assert all("left-pad==1.0 is not in constraints.txt" in line for line in found)


def test_another_package_that_is_missing_elsewhere_is_a_fault_and_so_is_a_new_wheel() -> None:
    resolver, _ = index(python="3.13", platform=MAC, answer=Answer({}, "torch has no wheels"))
    assert list(lock.faults(resolver, lambda _: None)) == [
        f"Python 3.13, {MAC}: more than megatron-core is missing: torch has no wheels"
    ]
    resolver, _ = index(everywhere=True)
    assert [line.split(": ", 1)[1][:27] for line in lock.faults(resolver, lambda _: None)] == [
        "megatron-core has a wheel n"
    ] * len(lock.ELSEWHERE)


def test_one_fault_is_exit_code_1(capsys) -> None:
    assert lock.main(index()[0]) == 0
    assert lock.main(index(everywhere=True)[0]) == 1
    assert "has a wheel now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "pins"),
    [
        ("a-b==1\n", {"a-b": "1"}),
        ("# x==1\n--index==2\nA_b.c==1.0 ; python_version < '3.12'\nuv\n", {"a-b-c": "1.0"}),
    ],
)
def test_names_are_normalised_and_markers_cut(text, pins) -> None:
    assert read_pins(text) == pins

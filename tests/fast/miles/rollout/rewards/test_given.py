"""Functions that a program gives: told apart by what they do, run in worker processes by value."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from miles.config import ConfigError
from miles.rollout.rewards import RewardConfig, build_reward, give
from miles.rollout.rewards.kinds import given as given_module
from miles.rollout.rewards.kinds.given import fingerprint


def defined(source: str, folder: Path, **values: Any) -> Any:
    """The function `reward` of a module that no other process can import."""
    path = folder / f"cell_{len(list(folder.iterdir()))}.py"
    path.write_text(source)
    names: dict[str, Any] = {"__name__": "__main__", **values}
    exec(compile(source, str(path), "exec"), names)
    return names["reward"]


SOURCE = """
def helper(text):
    return text.strip()

def reward(completion, answer, metadata):
    return scale * (helper(completion) == answer)
"""


def test_what_changes_the_function_changes_its_fingerprint(tmp_path: Path) -> None:
    first = fingerprint(defined(SOURCE, tmp_path, scale=1.0))
    assert fingerprint(defined(SOURCE, tmp_path, scale=1.0)) == first
    others = [
        defined(SOURCE, tmp_path, scale=2.0),
        defined(SOURCE.replace("strip", "lower"), tmp_path, scale=1.0),
        defined(SOURCE.replace("==", "!="), tmp_path, scale=1.0),
    ]
    assert len({first, *map(fingerprint, others)}) == 4


def test_what_a_function_closes_over_and_its_defaults_count() -> None:
    def make(least: float, *, most: float = 1.0) -> Any:
        def reward(completion, answer, metadata, most=most):
            return min(most, max(least, len(completion)))

        return reward

    def by_name(least: float) -> Any:
        def reward(completion, answer, metadata, *, floor=least):
            return floor

        return reward

    assert fingerprint(by_name(0)) != fingerprint(by_name(1))
    prints = [fingerprint(make(*values, most=most)) for values, most in (((0,), 1), ((0,), 1), ((1,), 1), ((0,), 2))]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_functions_that_call_each_other_have_an_end(tmp_path: Path) -> None:
    source = (
        "def other(n):\n    return reward(n, n, n)\n\ndef reward(completion, answer, metadata):\n    return other(1)\n"
    )
    assert len(fingerprint(defined(source, tmp_path))) == 64


def test_it_runs_in_a_worker_process_with_what_it_carries(judge, tmp_path: Path) -> None:
    function = defined(SOURCE, tmp_path, scale=0.5)
    config = give(function)
    assert judge(["42 ", "41"], answer="42", kind="callable", options=config).rewards == [0.5, 0.0]
    built = build_reward(RewardConfig(kind="callable", options=config))
    assert (built.name, built.worker is not None) == ("reward", True)


def test_a_coroutine_function_runs_in_the_event_loop(judge) -> None:
    threads = []

    async def reward(completion, answer, metadata):
        await asyncio.sleep(0)
        threads.append(threading.current_thread())
        return float(completion == answer)

    config = give(reward)
    assert judge(["42", "41"], answer="42", kind="callable", options=config).rewards == [1.0, 0.0]
    assert set(threads) == {threading.main_thread()}


def test_what_cannot_travel_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    def reward(completion, answer, metadata):
        with lock:
            return 1.0

    with pytest.raises(
        ConfigError, match=r"reward: reward cannot be sent to a worker process \(TypeError: .*inside of it"
    ):
        build_reward(RewardConfig(kind="callable", options=give(reward)))
    monkeypatch.setattr(given_module, "MAX_PICKLE_BYTES", 1 << 20)
    table = "x" * (3 << 20)

    def large(completion, answer, metadata):
        return float(completion in table)

    with pytest.raises(
        ConfigError, match="reward: large carries 3 MiB with it, at most 1; read large data from a file"
    ):
        build_reward(RewardConfig(kind="callable", options=give(large)))


def test_objects_with_a_call_and_lambdas_are_functions_too(judge) -> None:
    class Judge:
        def __init__(self, worth: float) -> None:
            self.worth = worth

        def __call__(self, completion, answer, metadata):
            return self.worth

    assert judge(["a"], kind="callable", options=give(Judge(0.25))).rewards == [0.25]
    assert fingerprint(Judge(0.25)) != fingerprint(Judge(0.5))
    assert judge(["a"], kind="callable", options=give(lambda c, a, m: 0.75)).rewards == [0.75]

"""Reward kind `math_boxed`."""

from __future__ import annotations

from typing import Any

from miles.config import ConfigError
from miles.rollout.math_answers.boxed import last_boxed, quick_verdict
from miles.rollout.rewards.function import RewardFn, WorkerCall
from miles.rollout.rewards.options import read_options


def math_boxed(options: dict[str, Any]) -> RewardFn:
    """The last \\boxed{...} equals the answer, as text, number or expression (in a process that can be killed)."""
    timeout_s = float(read_options("math_boxed", options, timeout_s=((int, float), 5.0))["timeout_s"])
    if not 0 < timeout_s < float("inf"):
        raise ConfigError(f"rollout.reward.options.timeout_s: {timeout_s:g} is no time limit; write seconds above 0")
    call = WorkerCall("miles.rollout.math_answers.judge:make", computes=True, memory_gib=1.5, timeout_s=timeout_s)
    return RewardFn("math_boxed", worker=call, quick=_quick, masks_errors=True)


def _quick(completion: str, answer: str) -> float | None:
    found = last_boxed(completion)
    if found is None:
        return 0.0
    verdict = quick_verdict(found, answer)
    return None if verdict is None else float(verdict)

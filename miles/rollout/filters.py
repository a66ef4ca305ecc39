"""Which finished groups are trained on. Filters are pure and run in order; the first refusal wins.

A group is counted in a filter by its samples that have an outcome and a reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from miles.config import ConfigError, user_code
from miles.data.sample import Sample
from miles.rollout.config import FilterConfig, FiltersConfig, NoAbortedFilter, NonzeroStdFilter, UserFilter
from miles.rollout.errors import RolloutStarved

ZERO_SPREAD = 1e-8


@dataclass(frozen=True, slots=True)
class Keep:
    """A filter's verdict. `reason` names the refusal; it is a metric's name."""

    keep: bool
    reason: str = ""


GroupFilter = Callable[[Sequence[Sample]], Keep]
KEPT = Keep(True)


def counted_rewards(group: Sequence[Sample], part: str | None = None) -> np.ndarray:
    """float64: one reward, or that part of it, for each rollout that has an outcome and a reward."""
    counted = [s for s in group if s.reward is not None and s.status.has_outcome]
    by_rollout = {s.rollout_id: s.reward if part is None else _part(s, part) for s in counted}
    return np.array(list(by_rollout.values()), dtype=np.float64)


def _part(sample: Sample, name: str) -> float:
    if name not in sample.reward_parts:
        known = ", ".join(sorted(sample.reward_parts)) or "none"
        raise ConfigError(
            f"rollout.filters: check_reward_nonzero_std compares the part {name!r}, and the reward of sample "
            f"{sample.sample_id} has no such part (it has: {known}); name one that every reward has, or remove part"
        )
    return sample.reward_parts[name]


def check_reward_nonzero_std(group: Sequence[Sample], *, part: str | None = None) -> Keep:
    """Refuses equal rewards: max - min <= 1e-8 in float64, the rule of the advantages too."""
    rewards = counted_rewards(group, part)
    if len(rewards) < 2 or float(rewards.max() - rewards.min()) <= ZERO_SPREAD:
        return Keep(False, "zero_std")
    return KEPT


def check_no_aborted(group: Sequence[Sample]) -> Keep:
    """Refuses a group with a sample that was aborted or failed, or has no reward."""
    if any(not s.status.has_outcome or s.reward is None for s in group):
        return Keep(False, "aborted")
    return KEPT


def reward_range(lo: float, hi: float) -> GroupFilter:
    """Keeps a group whose mean reward is in [lo, hi]."""

    def check(group: Sequence[Sample]) -> Keep:
        rewards = counted_rewards(group)
        if len(rewards) == 0:
            return Keep(False, "no_reward")
        mean = float(rewards.mean())
        return KEPT if lo <= mean <= hi else Keep(False, "reward_below" if mean < lo else "reward_above")

    return check


def user_filter(path: str) -> GroupFilter:
    """The user's `(group) -> bool`; a refusal is counted under the function's name. `ConfigError` when it fails."""
    option = "rollout.filters.chain"
    function = user_code.load(path, option=option, parameters=("group",))
    refused = Keep(False, path.rpartition(":")[2])

    def check(group: Sequence[Sample]) -> Keep:
        with user_code.running(path, option=option):
            keep = function(list(group))
        if not isinstance(keep, (bool, np.bool_)):
            raise ConfigError(f"{option}: {path} returned {keep!r:.60}; return True to keep the group, or False")
        return KEPT if keep else refused

    return check


def build_filter(config: FilterConfig) -> GroupFilter:
    if isinstance(config, NonzeroStdFilter):
        return partial(check_reward_nonzero_std, part=config.part)
    if isinstance(config, NoAbortedFilter):
        return check_no_aborted
    if isinstance(config, UserFilter):
        return user_filter(config.path)
    return reward_range(config.lo, config.hi)


class FilterChain:
    """The filters of a run, with counts and the starvation guard."""

    def __init__(self, config: FiltersConfig, *, starvation_limit: int) -> None:
        self._filters = [build_filter(c) for c in config.chain]
        self._limit = starvation_limit
        self._in_a_row: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def judge(self, group: Sequence[Sample]) -> Keep:
        """The verdict; `RolloutStarved` when too many groups in a row were refused."""
        for check in self._filters:
            verdict = check(group)
            if not verdict.keep:
                self.refused[verdict.reason] += 1
                self._in_a_row[verdict.reason] += 1
                self._check_starved()
                return verdict
        self._in_a_row.clear()
        return KEPT

    def take_counts(self) -> dict[str, int]:
        """Refusals by reason since the last call."""
        counts, self.refused = dict(self.refused), Counter()
        return counts

    def _check_starved(self) -> None:
        total = sum(self._in_a_row.values())
        if total >= self._limit:
            counts = ", ".join(f"{reason} {n}" for reason, n in sorted(self._in_a_row.items()))
            raise RolloutStarved(
                f"{total} groups in a row were refused by rollout.filters ({counts}); loosen the filters, use easier "
                "or harder prompts, or raise rollout.filters.starvation_limit"
            )

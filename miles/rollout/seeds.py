"""Seeds of sampling: pure functions of the run's seed and the sample's place, so that a resumed run repeats itself."""

from __future__ import annotations

from collections.abc import Iterable

_MASK = (1 << 64) - 1


def sampling_seeds(run_seed: int, group_id: int, count: int, *, attempt: int = 0) -> list[int]:
    """One seed for each sample of a group. `group_id` is the prompt's index in the stream, unique in the run;
    `attempt` counts how often the group was submitted anew. The step is left out on purpose: synchronous and
    asynchronous rollouts give a group the same seeds."""
    state = _absorb(0x6A09E667F3BCC909, (run_seed, group_id, attempt))
    return [_finish(_absorb(state, (index,))) for index in range(count)]


def _absorb(state: int, parts: Iterable[int]) -> int:
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def _finish(state: int) -> int:
    return state >> 1

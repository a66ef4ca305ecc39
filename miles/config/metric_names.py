"""The metrics that a step can report: what `expect` and `quant.gates` may name, and which may be negative.

The list itself is `metric_table.py`. Some are reported only where they are measured (`train/value_loss` with a critic,
`rollout/staleness_max` with stale samples); a rule of the recipe knows which.
"""

from __future__ import annotations

from collections.abc import Iterable

from miles.config.metric_table import COLUMNS, REFUSED, REWARD_PARTS, STEP
from miles.config.names import suggestion

SIGNED = frozenset(metric.name for metric in STEP if metric.signed)
METRICS = frozenset(metric.name for metric in STEP)
_COLUMNS = frozenset(metric.name for metric in COLUMNS)


def signed(name: str) -> bool | None:
    """Whether a metric may be negative; None for a name that no step reports. Counts of filters are not."""
    return name in SIGNED or name.startswith(REWARD_PARTS) if fault(name) is None else None


def fault(name: str) -> str | None:
    """Why no step can report `name`; None for a metric. Filters and reward functions name their own below `rollout/refused/` and
    `rollout/reward/`."""
    if name in METRICS or any(name.startswith(users) and name != users for users in (REFUSED, REWARD_PARTS)):
        return None
    if name.startswith("eval/"):
        return "is measured once after the last step, and bounds are kept by what steps report"
    same = sorted(metric for metric in METRICS if metric.partition("/")[2] == name.rpartition("/")[2])
    hint = f"did you mean {' or '.join(same)}?" if same else suggestion(name, METRICS)
    return f"is no metric that a step reports; {hint}"


def unregistered(names: Iterable[str]) -> list[str]:
    """Those of a row's names that the list of metrics lacks."""
    return [name for name in names if name not in _COLUMNS and fault(name) is not None]

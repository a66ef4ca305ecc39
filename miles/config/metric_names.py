"""The metrics that a step can report: what `expect` and `quant.gates` may name, and which may be negative.

The list itself is `metric_table.py`. Some are reported only where they are measured (`train/value_loss` with a critic,
`rollout/staleness_max` with stale samples); a rule of the recipe knows which.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from miles.config.metric_table import COLUMNS, EVALUATION, REFUSED, REWARD_PARTS, STEP
from miles.config.names import suggestion

SIGNED = frozenset(metric.name for metric in STEP if metric.signed)
METRICS = frozenset(metric.name for metric in STEP)
_COLUMNS = frozenset(metric.name for metric in COLUMNS)
# What a set may be called; part of the names of its metrics.
SET_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}"
_EVALUATED = re.compile(
    "|".join(re.escape(metric.name).replace("<set>", SET_NAME).replace("<k>", "[1-9][0-9]*") for metric in EVALUATION)
)


def signed(name: str) -> bool | None:
    """Whether a metric may be negative; None for a name that no step reports. Counts of filters are not."""
    return name in SIGNED or name.startswith(REWARD_PARTS) if fault(name) is None else None


def fault(name: str) -> str | None:
    """Why no step can report `name`; None for a metric. Filters and reward functions name their own below `rollout/refused/` and
    `rollout/reward/`."""
    if name in METRICS or any(name.startswith(users) and name != users for users in (REFUSED, REWARD_PARTS)):
        return None
    if name.startswith("eval/") or is_evaluated(name):
        return "is measured now and then, and a gate needs its metric in every step; bound it in expect"
    same = sorted(metric for metric in METRICS if metric.partition("/")[2] == name.rpartition("/")[2])
    hint = f"did you mean {' or '.join(same)}?" if same else suggestion(name, METRICS)
    return f"is no metric that a step reports; {hint}"


def is_evaluated(name: str) -> bool:
    """Whether an evaluation may report `name`, of a set of any name."""
    return _EVALUATED.fullmatch(name) is not None


def unregistered(names: Iterable[str]) -> list[str]:
    """Those of a row's names that the list of metrics lacks."""
    return [name for name in names if name not in _COLUMNS and not is_evaluated(name) and fault(name) is not None]

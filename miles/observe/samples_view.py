"""`miles samples RUN`: the samples of a run, readable. All text in them is the model's or the data's and is not trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from miles.config.errors import ConfigError
from miles.observe.samples_log import CURRENT, read_samples
from miles.observe.visible_text import visible

Order = Literal["best", "worst"]


def chosen(
    records: Sequence[dict[str, Any]], *, step: int | None, order: Order | None, limit: int
) -> list[dict[str, Any]]:
    """The newest step's without a `step` and an `order`; by reward with an order, those that nobody could judge last.

    `ConfigError` names the steps that are there when `step` has no samples.
    """
    if step is None and order is None and records:
        step = max(record["step"] for record in records)
    found = [record for record in records if step is None or record["step"] == step]
    if not found and records:
        steps = [record["step"] for record in records]
        raise ConfigError(f"step {step} has no samples here; there are some of steps {min(steps)} to {max(steps)}")
    if order is not None:
        sign = -1.0 if order == "best" else 1.0
        judged = [(sign * number, record) for record in found if (number := _number(record.get("reward"))) is not None]
        rest = [record for record in found if _number(record.get("reward")) is None]
        found = [record for _, record in sorted(judged, key=lambda pair: pair[0])] + rest
    return found[:limit]


def show(folder: Path, console: Console, *, step: int | None, order: Order | None, limit: int) -> None:
    """Print them. `ConfigError` when the folder holds none."""
    try:
        records, damaged = read_samples(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror})") from error
    if not records:
        raise ConfigError(
            f"{folder / CURRENT}: holds no samples; name a run folder such as runs/quickstart, and train with "
            "observe.samples.groups above 0"
        )
    for record in chosen(records, step=step, order=order, limit=limit):
        _print(record, console)
    if damaged:
        console.print(Text(f"{damaged} damaged line(s) were passed over"))


def _print(record: dict[str, Any], console: Console) -> None:
    reward = _number(record.get("reward"))
    head = f"step {record['step']}  group {record.get('group')}  reward {'none' if reward is None else _short(reward)}"
    console.print(Rule(Text(visible(head)), align="left"))
    _field("prompt", record.get("prompt"), console)
    _field("completion", record.get("completion"), console)
    parts = record.get("reward_parts")
    said = [f"{name} {_short(value)}" for name, value in parts.items()] if isinstance(parts, dict) else []
    versions = record.get("weight_versions")
    said += [
        f"log-prob sum {_short(record.get('log_prob_sum'))}",
        f"{record.get('tokens')} tokens",
        str(record.get("status")),
    ]
    said += [f"weights {', '.join(map(str, versions))}"] if isinstance(versions, list) and versions else []
    console.print(Text(visible("  ".join(said)), style="dim"), soft_wrap=True)


def _field(name: str, value: Any, console: Console) -> None:
    # As text objects, never as strings: what looks like markup stays what it is.
    console.print(Text(name, style="bold"))
    console.print(Text(visible(str(value))), soft_wrap=True)


def _short(value: Any) -> str:
    number = _number(value)
    return str(value) if number is None else f"{number:.4g}"


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number

"""`docs/reference/metrics.md`, made of the list of metrics: `python -m checks.metrics_page` writes it.

`--check` writes nothing and exits with 1 when the page is not what the list makes; part of `make lint`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from miles.config import metric_table
from miles.config.metric_table import Metric

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "metrics.md"
HEAD = """# Metrics

One row of `metrics.jsonl` a step, and the same numbers in every tracker. Made from `miles/config/metric_table.py` by
`make generate`. A name in this list keeps its meaning. A metric without an entry under "reported" is in every row of a
step that trained; a skipped step has only what comes before training. [Reading the metrics](../guide/reading-metrics.md)
says what to do about them; those of [evaluations](../guide/evaluation.md) stand in the rows of the steps that they came before.

Numbers that JSON lacks are written as `"NaN"`, `"Infinity"` and `"-Infinity"`. Shares run from 0 to 1; a `loss` has no unit
of its own.
"""
SECTIONS = {
    "rollout": "Samples and rewards",
    "train": "Training",
    "mismatch": "Trainer against engine",
    "data": "Packing",
    "time": "Time",
}


def page() -> str:
    """The whole page."""
    parts = [HEAD, _table("Columns", metric_table.COLUMNS)]
    listed = [*metric_table.STEP, *metric_table.PATTERNS]
    for group, title in SECTIONS.items():
        parts.append(_table(title, [metric for metric in listed if metric.name.startswith(f"{group}/")]))
    parts.append(_table("Evaluation", metric_table.EVALUATION))
    return "\n".join(parts)


def _table(title: str, metrics: Iterable[Metric]) -> str:
    lines = [f"## {title}", "", "| metric | unit | meaning | reported |", "|---|---|---|---|"]
    for metric in metrics:
        unit = metric.unit + (", may be negative" if metric.signed else "")
        lines.append(f"| `{metric.name}` | {unit} | {metric.meaning} | {metric.when} |")
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(f"unknown: {' '.join(arguments)}; the one option is --check", file=sys.stderr)
        return 2
    wanted = page()
    if not arguments:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != wanted:
        print(f"{PAGE}: is not what the list of metrics makes; run `make generate`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

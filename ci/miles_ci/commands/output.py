"""Tables for people, JSON for programs.

`rich` draws the table on a terminal when it is installed; elsewhere columns are aligned with spaces.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def print_json(data: Any) -> None:
    """One JSON document, keys in the order given."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> None:
    """Rows under headers; `right` lists the columns that are aligned right."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(box=None, header_style="bold", pad_edge=False)
            for index, header in enumerate(headers):
                table.add_column(header, justify="right" if index in right else "left", no_wrap=True)
            for row in rows:
                table.add_row(*(escape_markup(str(cell)) for cell in row))
            # A row broken inside its cells is unreadable: on a narrow terminal the line runs on instead.
            needed = max(len(line) for line in plain_table(headers, rows, right=right).split("\n"))
            console = Console()
            Console(width=max(console.width, needed + len(headers))).print(table)
            return
    print(plain_table(headers, rows, right=right))


def escape_markup(text: str) -> str:
    return text.replace("[", "\\[")


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """The table as text without trailing spaces."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(headers))]
    lines = []
    for row in cells:
        parts = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def seconds(ms: int) -> str:
    """Milliseconds for people: 0.4 s, 12 s, 3 min 20 s, 2 h 05 min."""
    if ms < 10_000:
        return f"{ms / 1000:.1f} s"
    total = round(ms / 1000)
    if total < 120:
        return f"{total} s"
    if total < 7200:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"

"""Live progress of a run: a table that redraws itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import html
import io
import itertools
import time
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from miles.config import environment

REDRAW_INTERVAL_S = 0.15
REWARD = "rollout/reward_mean"
PLAIN_INTERVAL_S = 5.0
NOTEBOOK_WIDTH = 100
# Lines above the block of a notebook.
MOST_SAID = 100
SPARK = "▁▂▃▄▅▆▇█"


class Progress(Protocol):
    """What the training loop tells the person who watches."""

    def stage(self, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def step(self, row: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


def open_progress(*, name: str, total_steps: int, console: Console) -> Progress:
    """A live view on a terminal or in a notebook; one line now and then in a log."""
    if console.is_jupyter and not console.quiet:
        return NotebookProgress(name=name, total_steps=total_steps)
    plain = not console.is_terminal or environment.read("MILES_NO_COLOR") == "1"
    if plain:
        return PlainProgress(name=name, total_steps=total_steps, console=console)
    return LiveProgress(name=name, total_steps=total_steps, console=console)


class PlainProgress:
    """One line per stage, then one line at most every `PLAIN_INTERVAL_S` seconds and at the last step."""

    def __init__(self, *, name: str, total_steps: int, console: Console) -> None:
        self._name, self._total, self._console = name, total_steps, console
        self._last = 0.0

    def stage(self, text: str) -> None:
        self._console.print(f"{self._name}: {text}", highlight=False, markup=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self.stage(text)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def step(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        last_step = row["step"] + 1 >= self._total
        if now - self._last < PLAIN_INTERVAL_S and not last_step:
            return
        self._last = now
        text = f"step {row['step'] + 1}/{self._total}  {_outcome(row)}  "
        text += f"{row['rollout/tokens_per_s']:.0f} tokens/s  {_phases(row)}"
        self.stage(text)

    def close(self) -> None:
        return


class _Block:
    """What is redrawn: bar, reward with its recent course, loss, tokens per second, time per phase."""

    def __init__(self, *, name: str, total_steps: int) -> None:
        self._name, self._total = name, total_steps
        self._rewards: list[float] = []
        self._stage = "starting"
        self._row: dict[str, Any] = {}
        self._last = 0.0

    def _show(self) -> None:
        raise NotImplementedError

    def stage(self, text: str) -> None:
        self._stage = text
        self._redraw()

    def step(self, row: dict[str, Any]) -> None:
        self._row, self._stage = row, "training"
        if REWARD in row:
            self._rewards.append(float(row[REWARD]))
        if time.monotonic() - self._last >= REDRAW_INTERVAL_S or row["step"] + 1 >= self._total:
            self._redraw()

    def _redraw(self) -> None:
        self._last = time.monotonic()
        self._show()

    def _render(self) -> Group:
        done = self._row.get("step", -1) + 1
        head = Text.assemble((self._name, "bold"), f"  {self._stage}  step {done}/{self._total}")
        if not self._row:
            return Group(head)
        table = Table.grid(padding=(0, 2))
        if self._rewards:
            table.add_row("reward", f"{self._rewards[-1]:.3f}", sparkline(self._rewards, width=40))
        if "train/loss" in self._row:
            table.add_row("loss", f"{self._row['train/loss']:.4f}", f"grad norm {self._row['train/grad_norm']:.3f}")
        else:
            table.add_row("loss", "step skipped", "no sample counted")
        table.add_row("tokens/s", f"{self._row['rollout/tokens_per_s']:.0f}", _phases(self._row))
        return Group(head, ProgressBar(total=self._total, completed=done, width=60), table)


class LiveProgress(_Block):
    """The block at the foot of a terminal."""

    def __init__(self, *, name: str, total_steps: int, console: Console) -> None:
        super().__init__(name=name, total_steps=total_steps)
        self._live = Live(self._render(), console=console, auto_refresh=False, transient=False)
        self._live.start()

    def say(self, text: str) -> None:
        # Above the block that is redrawn, where it stays.
        self._live.console.print(f"{self._name}: {text}", highlight=False, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def close(self) -> None:
        self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self) -> None:
        self._live.update(self._render(), refresh=True)


class NotebookProgress(_Block):
    """The block in the cell's output, and what is said above it."""

    def __init__(self, *, name: str, total_steps: int) -> None:
        super().__init__(name=name, total_steps=total_steps)
        from IPython.display import display

        self._said: list[str] = []
        self._handle = display(self._bundle(), raw=True, display_id=True)

    def say(self, text: str) -> None:
        self._said.append(f"{self._name}: {text}")
        self._redraw()

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def close(self) -> None:
        self._redraw()

    def _show(self) -> None:
        self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        """The text as a notebook's front end wants it."""
        # Not the front end's console: the text goes into the one output that is replaced.
        console = Console(file=io.StringIO(), width=NOTEBOOK_WIDTH, force_jupyter=False, force_terminal=False)
        for line in self._said[-MOST_SAID:]:
            console.print(line, highlight=False, markup=False)
        console.print(self._render())
        text = console.file.getvalue()  # type: ignore[attr-defined]
        return {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}


def _outcome(row: dict[str, Any]) -> str:
    """What a step came to in a word: its reward, or its loss where answers are given and not judged."""
    if REWARD in row:
        return f"reward {row[REWARD]:.3f}"
    return f"loss {row['train/loss']:.4f}" if "train/loss" in row else "step skipped"


def sparkline(values: list[float], *, width: int) -> str:
    """The course of `values` in `width` characters, low to high as block heights (scale 0 to 1)."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    top = len(SPARK) - 1
    return "".join(SPARK[round(min(max(mean, 0.0), 1.0) * top)] for mean in means)


def _phases(row: dict[str, Any]) -> str:
    names = [key for key in row if key.startswith("time/") and key != "time/step"]
    return " ".join(f"{key.removeprefix('time/')} {1000 * row[key]:.0f}ms" for key in names)

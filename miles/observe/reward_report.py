"""The curve of a finished run: `reward.png` and `reward.html`, or those of the loss where no answer was judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config.files import replacing

MEAN_OVER = 5


@dataclass(frozen=True)
class Curve:
    """`word` names it and its files. `bounds`: of the axis, None for those of the values."""

    metric: str
    word: str
    bounds: tuple[float, float] | None


REWARD = Curve("rollout/reward_mean", "reward", (0, 1.02))
LOSS = Curve("train/loss", "loss", None)


def moving_mean(values: list[float], over: int = MEAN_OVER) -> list[float]:
    """Mean of the last `over` values up to each place (fewer at the start)."""
    return [sum(values[max(0, i + 1 - over) : i + 1]) / min(over, i + 1) for i in range(len(values))]


def write_reward_report(rows: list[dict[str, Any]], folder: Path, *, name: str, curve: Curve = REWARD) -> None:
    """Write both plots from the metrics rows that have the curve's metric."""
    found = [(row["step"], float(row[curve.metric])) for row in rows if curve.metric in row]
    steps, values = [step for step, _ in found], [value for _, value in found]
    _write_png(steps, values, folder / f"{curve.word}.png", name, curve)
    _write_html(steps, values, folder / f"{curve.word}.html", name, curve)


def _write_png(steps: list[int], values: list[float], path: Path, name: str, curve: Curve) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, values, color="#9ecae1", linewidth=1, label=f"{curve.word}, each step")
    axes.plot(steps, moving_mean(values), color="#08519c", linewidth=2, label=f"mean of {MEAN_OVER} steps")
    axes.set(title=name, xlabel="step", ylabel=f"mean {curve.word}")
    if curve.bounds is not None:
        axes.set_ylim(*curve.bounds)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)


def _write_html(steps: list[int], values: list[float], path: Path, name: str, curve: Curve) -> None:
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.add_scatter(x=steps, y=values, name=f"{curve.word}, each step", line={"width": 1, "color": "#9ecae1"})
    figure.add_scatter(x=steps, y=moving_mean(values), name=f"mean of {MEAN_OVER} steps", line={"color": "#08519c"})
    figure.update_layout(title=name, xaxis_title="step", yaxis_title=f"mean {curve.word}", yaxis_range=curve.bounds)
    with replacing(path) as temporary:
        # The script is written into the page, so that it opens without a network.
        figure.write_html(temporary, include_plotlyjs=True)

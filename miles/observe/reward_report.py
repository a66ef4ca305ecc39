"""The reward curve of a finished run as `reward.png` and `reward.html`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles.config.files import replacing

MEAN_OVER = 5


def moving_mean(values: list[float], over: int = MEAN_OVER) -> list[float]:
    """Mean of the last `over` values up to each place (fewer at the start)."""
    return [sum(values[max(0, i + 1 - over) : i + 1]) / min(over, i + 1) for i in range(len(values))]


def write_reward_report(rows: list[dict[str, Any]], folder: Path, *, name: str) -> None:
    """Write both plots from metrics rows (`step`, `rollout/reward_mean`)."""
    steps = [row["step"] for row in rows]
    rewards = [float(row["rollout/reward_mean"]) for row in rows]
    _write_png(steps, rewards, folder / "reward.png", name)
    _write_html(steps, rewards, folder / "reward.html", name)


def _write_png(steps: list[int], rewards: list[float], path: Path, name: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="reward, each step")
    axes.plot(steps, moving_mean(rewards), color="#08519c", linewidth=2, label=f"mean of {MEAN_OVER} steps")
    axes.set(title=name, xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)


def _write_html(steps: list[int], rewards: list[float], path: Path, name: str) -> None:
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.add_scatter(x=steps, y=rewards, name="reward, each step", line={"width": 1, "color": "#9ecae1"})
    figure.add_scatter(x=steps, y=moving_mean(rewards), name=f"mean of {MEAN_OVER} steps", line={"color": "#08519c"})
    figure.update_layout(title=name, xaxis_title="step", yaxis_title="mean reward", yaxis_range=[0, 1.02])
    with replacing(path) as temporary:
        # The script is written into the page, so that it opens without a network.
        figure.write_html(temporary, include_plotlyjs=True)

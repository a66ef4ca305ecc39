"""The views made of metrics rows: live progress, plots."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from miles.config import ConfigError
from miles.observe import progress
from miles.observe.progress import LiveProgress, PlainProgress, open_progress, sparkline
from miles.observe.reward_report import moving_mean, write_reward_report


def row(step: int, reward: float = 0.5) -> dict[str, Any]:
    return {
        "step": step,
        "rollout/reward_mean": reward,
        "rollout/tokens_per_s": 1234.0,
        "train/loss": -0.25,
        "train/grad_norm": 1.5,
        "time/rollout": 0.04,
        "time/train": 0.02,
        "time/step": 0.07,
    }


def test_sparkline_goes_from_low_to_high_and_stays_in_its_width() -> None:
    assert sparkline([], width=5) == ""
    assert sparkline([0.0, 1.0], width=5) == "▁█"
    assert sparkline([i / 99 for i in range(100)], width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([-3.0, 7.0], width=2) == "▁█"
    assert len(sparkline([0.5] * 1000, width=40)) == 40


def test_plain_progress_prints_stages_the_first_step_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    out = io.StringIO()
    shown = PlainProgress(name="run", total_steps=3, console=Console(file=out, width=40))
    shown.stage("starting")
    for step in range(3):
        shown.step(row(step, reward=step / 4))
    shown.close()
    assert out.getvalue().splitlines() == [
        "run: starting",
        "run: step 1/3  reward 0.000  1234 tokens/s  rollout 40ms train 20ms",
        "run: step 3/3  reward 0.500  1234 tokens/s  rollout 40ms train 20ms",
    ]


def test_live_progress_shows_reward_rate_and_phase_times() -> None:
    out = io.StringIO()
    with LiveProgress(name="run", total_steps=2, console=Console(file=out, force_terminal=True, width=100)) as shown:
        shown.stage("starting trainer")
        shown.step(row(0, 0.1))
        shown.step(row(1, 0.9))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    for said in ("starting trainer", "step 2/2", "0.900", "▂▇", "1234", "rollout 40ms train 20ms", "grad norm 1.500"):
        assert said in text


def test_live_progress_of_a_skipped_step_has_no_loss_to_show() -> None:
    out = io.StringIO()
    with LiveProgress(name="run", total_steps=1, console=Console(file=out, force_terminal=True, width=100)) as shown:
        skipped = {name: value for name, value in row(0).items() if name not in ("train/loss", "train/grad_norm")}
        shown.step(skipped | {"train/step_skipped": 1.0})
    assert "step skipped" in out.getvalue()


def test_a_warning_names_the_run_and_stays_above_the_live_view() -> None:
    out = io.StringIO()
    PlainProgress(name="run", total_steps=1, console=Console(file=out, width=40)).warn("look [here]")
    with LiveProgress(name="run", total_steps=1, console=Console(file=out, force_terminal=True, width=100)) as shown:
        shown.warn("look [there]")
        shown.step(row(0))
    plain, live, *_ = [line for line in out.getvalue().splitlines() if "warning" in line]
    assert plain == "run: warning: look [here]"
    assert "run: warning: look [there]" in live


def test_a_notebook_has_one_output_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, bundle: dict[str, str], *, raw: bool) -> None:
            assert raw
            shown.append(bundle)

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert (raw, display_id) == (True, True)
        shown.append(bundle)
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    progress = open_progress(name="run", total_steps=2, console=Console(force_jupyter=True))
    progress.stage("starting trainer")
    progress.warn("look <here> [there]")
    progress.step(row(0, 0.1))
    progress.step(row(1, 0.9))
    progress.close()
    assert "run  starting  step 0/2" in shown[0]["text/plain"]
    text = shown[-1]["text/plain"]
    for said in ("warning: look <here> [there]", "step 2/2", "0.900", "▂▇", "1234", "grad norm 1.500"):
        assert said in text
    assert "look &lt;here&gt; [there]" in shown[-1]["text/html"]
    assert shown[-1]["text/html"].startswith("<pre>")
    assert isinstance(
        open_progress(name="r", total_steps=1, console=Console(force_jupyter=True, quiet=True)), PlainProgress
    )


def test_terminal_gets_the_live_view_and_a_log_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(terminal: bool) -> type:
        shown = open_progress(name="r", total_steps=1, console=Console(file=io.StringIO(), force_terminal=terminal))
        shown.close()
        return type(shown)

    assert opened(False) is PlainProgress
    assert opened(True) is LiveProgress
    monkeypatch.setenv("MILES_NO_COLOR", "1")
    assert opened(True) is PlainProgress


def test_moving_mean_uses_what_is_there_at_the_start() -> None:
    assert moving_mean([1.0, 3.0, 5.0, 7.0], over=2) == [1.0, 2.0, 4.0, 6.0]
    assert moving_mean([]) == []


def test_report_is_a_png_and_a_page_that_needs_no_network(tmp_path: Path) -> None:
    write_reward_report([row(step, step / 10) for step in range(10)], tmp_path, name="run")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["reward.html", "reward.png"]
    assert (tmp_path / "reward.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    page = (tmp_path / "reward.html").read_text()
    assert '"name":"reward, each step"' in page
    assert not re.search(r"<(script|link)[^>]+(src|href)=[\"']https?:", page)


def test_report_that_cannot_be_written_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"reward\.png: a part of this path is a file"):
        write_reward_report([row(0)], tmp_path / "file", name="run")

"""`miles samples`: which samples, and what a terminal gets of text that nobody can trust."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from miles.cli import app
from miles.config import ConfigError
from miles.observe.samples_view import chosen, show


def record(step: int, reward: Any, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "group": 4,
        "prompt": "1+1=",
        "completion": f"answer {reward}",
        "reward": reward,
        "reward_parts": {"format": 0.25},
        "log_prob_sum": -1.23456,
        "tokens": 3,
        "weight_versions": [7],
        "status": "completed",
        **more,
    }


RECORDS = [record(0, 0.5), record(0, 1.0), record(1, None), record(1, -2.0), record(1, 0.75)]


def rewards(**choice: Any) -> list[Any]:
    return [found["reward"] for found in chosen(RECORDS, **{"step": None, "order": None, "limit": 9, **choice})]


def test_the_newest_step_or_the_one_asked_for() -> None:
    assert rewards() == [None, -2.0, 0.75]
    assert rewards(step=0) == [0.5, 1.0]
    assert rewards(limit=2) == [None, -2.0]


def test_best_and_worst_are_of_all_steps_and_what_nobody_judged_comes_last() -> None:
    assert rewards(order="best") == [1.0, 0.75, 0.5, -2.0, None]
    assert rewards(order="worst") == [-2.0, 0.5, 0.75, 1.0, None]
    assert rewards(order="best", step=1, limit=1) == [0.75]


def test_a_step_without_samples_is_refused_with_those_that_have_some() -> None:
    with pytest.raises(ConfigError, match="step 9 has no samples here; there are some of steps 0 to 1"):
        rewards(step=9)


def written(folder: Path, *records: Any) -> Path:
    (folder / "samples.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in records))
    return folder


def shown(folder: Path, **choice: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=True, color_system="truecolor", emoji=True)
    show(folder, console, **{"step": None, "order": None, "limit": 9, **choice})
    return out.getvalue()


def test_markup_is_text_and_control_characters_are_visible(tmp_path: Path) -> None:
    hostile = "[bold red]x[/] [link=http://evil]:smile: \x1b]0;title\x07\x1b[2J\rover\u202e"
    parts = {"[red]\x1b": 1.0}
    text = shown(
        written(tmp_path, record(0, 0.1, prompt=hostile, completion=hostile, reward_parts=parts, status=hostile))
    )
    assert text.count("[bold red]x[/] [link=http://evil]:smile: \\x1b]0;title\\x07\\x1b[2J\\x0dover\\u202e") == 3
    assert "[red]\\x1b 1" in text
    for control in ("\x07", "\r", "\u202e", "\x1b]0", "\x1b[2J"):
        assert control not in text


def test_a_sample_is_printed_whole_with_its_numbers(tmp_path: Path) -> None:
    lines = shown(written(tmp_path, record(3, 0.5, completion="two\nlines " + "x" * 200)))
    for said in ("step 3  group 4  reward 0.5", "two\nlines " + "x" * 200, "log-prob sum -1.235", "format 0.25"):
        assert said in lines
    for said in ("3 tokens", "completed", "weights 7"):
        assert said in lines


def test_records_of_any_shape_are_printed(tmp_path: Path) -> None:
    odd = [{"step": 0}, {"step": 0, "reward": [1], "group": {"a": "\x1b"}, "reward_parts": 3, "weight_versions": "v"}]
    odd += [{"step": 0, "reward": int("9" * 400), "prompt": ["\x1b"], "reward_parts": {"a": None}}]
    text = shown(written(tmp_path, *odd, "no record"), order="best")
    assert text.count("reward none") == 3
    assert "1 damaged line(s) were passed over" in text


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        return str(CliRunner().invoke(app, ["samples", *arguments]).exception)

    assert "holds no samples; name a run folder" in refused(str(tmp_path))
    assert "holds no samples; name a run folder" in refused(str(tmp_path / "missing"))
    assert "--best and --worst exclude each other" in refused(str(tmp_path), "--best", "--worst")
    (tmp_path / "samples.jsonl").mkdir()
    assert "cannot be read (Is a directory)" in refused(str(tmp_path))


def test_the_command_prints_the_best(tmp_path: Path) -> None:
    written(tmp_path, *RECORDS)
    said = CliRunner().invoke(app, ["samples", str(tmp_path), "--best", "--limit", "1"])
    assert said.exit_code == 0
    assert "answer 1.0" in said.output
    assert said.output.count("answer") == 1
    of_step = CliRunner().invoke(app, ["samples", str(tmp_path), "--worst", "--step", "0", "--limit", "1"])
    assert "answer 0.5" in of_step.output

"""The chat example of the data guide, trained by the real loop: killed, it resumes with the same prompts and curve."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=120, suite="stage-b-cpu")

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "data.md"
STEPS = ("run.steps=8", "run.checkpoint_every=2", "eval.every=4")


def written(folder: Path) -> str:
    """The guide's recipe, with its files beside it."""
    folder.mkdir()
    text = GUIDE.read_text()
    (rows,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (folder / "problems.jsonl").write_text(rows)
    for block in re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.DOTALL):
        (folder / block.split()[1]).write_text(block)
    return str(folder / "sums.yaml")


def test_conversations_are_trained_and_a_killed_run_goes_on_with_them(runs, tmp_path):
    recipe = written(tmp_path / "my")
    whole = runs.run("whole", *STEPS, recipe=recipe)
    assert whole.returncode == 0, whole.stderr
    assert len(runs.curve("whole")) == 9, "one row a step and one of the last evaluation"
    assert all("eval/held_out/reward_mean" in row for row in runs.rows("whole")[::4])
    files = json.loads((tmp_path / "whole" / "inputs.json").read_text())["files"]
    assert {Path(file).name for file in files} >= {"problems.jsonl", "own.py"}
    settings = json.loads((tmp_path / "whole" / "hf_model" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in (tmp_path / "whole" / "hf_model" / "chat_template.jinja").read_text()

    killed = runs.start("killed", *STEPS, recipe=recipe)
    runs.wait_for_step("killed", 4, killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    resumed = runs.run("killed", *STEPS, recipe=recipe)
    assert resumed.returncode == 0, resumed.stderr
    assert runs.curve("killed") == runs.curve("whole")


def test_an_exported_chat_model_is_asked_by_another_recipe(runs, tmp_path):
    recipe = written(tmp_path / "my")
    made = runs.run("made", "run.steps=1", "eval.sets=[]", recipe=recipe)
    assert made.returncode == 0, made.stderr
    model = tmp_path / "made" / "hf_model"
    again = runs.run("again", "run.steps=1", f"model={{path: {model}}}", recipe=recipe)
    assert again.returncode == 0, again.stderr
    (tmp_path / "my" / "problems.jsonl").write_text('{"messages": [{"role": "human", "content": "1"}], "answer": 1}\n')
    refused = runs.run("refused", f"model={{path: {model}}}", recipe=recipe)
    assert refused.returncode == 2
    assert re.fullmatch(
        rf"error: {tmp_path}/my/problems\.jsonl:1: messages\[0\]\.role is \"human\"; use one of system, .*\n",
        refused.stderr,
    )

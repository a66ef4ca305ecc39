"""The files of the data guide are what its text says, and its commands accept them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

from miles.data.tokenizer import build_char_tokenizer
from miles.recipe import load
from miles.recipe.created_tokenizer import created_tokenizer
from miles.recipe.inputs import first_prompts

GUIDE = ROOT / "docs" / "guide" / "data.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The guide's files in `my/`."""
    my = tmp_path_factory.mktemp("guide") / "my"
    my.mkdir()
    text = GUIDE.read_text()
    (rows,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (my / "problems.jsonl").write_text(rows)
    for block in re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.DOTALL):
        (my / block.split()[1]).write_text(block)
    return my.parent


def test_the_commands_run(folder):
    commands = re.findall(r"^miles recipe check (\S+)$", GUIDE.read_text(), re.MULTILINE)
    assert commands == ["my/sums.yaml", "my/own_task.yaml"]
    for recipe in commands:
        done = subprocess.run(
            [sys.executable, "-m", "miles.cli", "recipe", "check", recipe],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        assert re.search(rf"^{re.escape(recipe)}: ok, digest ", done.stdout, re.MULTILINE)


def test_a_conversation_is_rendered_by_the_family_s_template(folder):
    recipe = load(folder / "my" / "sums.yaml")
    found = first_prompts(recipe)
    prompts = [*found.training, *found.evaluation["held_out"]]
    assert len({prompt.text for prompt in prompts}) == 5
    (several,) = {prompt.text for prompt in prompts if "+1<|im_end|>" in prompt.text and "\n2<|im_end|>" in prompt.text}
    turns = [("system", "Answer with one number."), ("user", "1+1"), ("assistant", "2"), ("user", "+1")]
    expected = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert several == expected + "<|im_start|>assistant\n"
    assert {prompt.metadata["level"] for prompt in prompts} == {"easy", "hard"}


def test_a_made_model_s_tokenizer_ends_answers_where_the_template_ends_turns(folder, tmp_path):
    alphabet, chat = created_tokenizer(load(folder / "my" / "sums.yaml"))
    made = build_char_tokenizer(alphabet, tmp_path, chat=chat)
    assert made.text_of(made.eos_id) == "<|im_end|>"


def test_the_own_task_draws_what_its_text_says(folder):
    prompts = first_prompts(load(folder / "my" / "own_task.yaml")).training
    for prompt in prompts:
        a, b = map(int, prompt.text.removesuffix("=").split("+"))
        assert (prompt.answer, prompt.metadata) == (a + b, {"digits": len(str(a + b))})
    assert len({prompt.text for prompt in prompts}) > 50


def test_the_own_reward_does_what_its_text_says(folder):
    space: dict = {}
    exec((folder / "my" / "own.py").read_text(), space)
    answer = {"sum": 42, "near": 4}
    assert [space["close"](text, answer, {}) for text in ("42", " 45", "46", "many")] == [1.0, 1.0, 0.1, 0.0]

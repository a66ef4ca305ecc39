"""What stands beside the recipe `calculator.yaml`: its task, its tool, and the two turns."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from miles.config import user_code
from miles.data.sample import Sample, Status
from miles.recipe import load
from miles.recipe.rules import check, facts_of
from miles.rollout.engine import GenerateResult
from miles.rollout.generate import GenerateContext

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes" / "calculator.yaml"
CHARACTERS = "0123456789+=:?$"
END = CHARACTERS.index("$")


@pytest.fixture(scope="module")
def own() -> ModuleType:
    function = user_code.load(f"{ROOT}/recipes/calculator.py:value_of", option="test", parameters=("call",))
    return sys.modules[function.__module__]


class Codec:
    def encode(self, text: str) -> np.ndarray:
        return np.array([CHARACTERS.index(character) for character in text], np.int64)

    def decode(self, ids) -> str:
        return "".join(CHARACTERS[int(index)] for index in ids)


class Writes:
    """An engine that says the given texts, one a request."""

    url = "writes"

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.asked: list[str] = []

    async def generate_many(self, requests):
        (request,) = requests
        self.asked.append(Codec().decode(request.input_ids))
        tokens = Codec().encode(self.texts.pop(0))
        stopped = int(tokens[-1]) in (END, *request.sampling.stop_token_ids)
        return [
            GenerateResult(
                rid=request.rid,
                tokens=tokens,
                log_probs=np.full(len(tokens), -0.5, np.float32),
                finish_reason="stop" if stopped else "length",
                prompt_tokens=len(request.input_ids),
                cached_tokens=0,
                weight_version=1,
                version_spans=np.array([[1, len(tokens)]], np.int64),
            )
        ]


def answered(own: ModuleType, *texts: str) -> tuple[Sample, Writes]:
    recipe = load(RECIPE)
    engine = Writes(*texts)
    ctx = GenerateContext(engine, recipe.rollout, 64, {"s": 1}, Codec())
    prompt = Codec().encode("3+9=")
    sample = Sample("s", 0, 0, tokens=prompt, prompt_length=4)
    return asyncio.run(own.calculator(ctx, sample, ctx.sampling())), engine


def test_a_call_is_answered_and_only_what_the_policy_wrote_is_trained(own):
    sample, engine = answered(own, "3+9=", "12$")
    assert Codec().decode(sample.tokens) == "3+9=3+9=12:12$"
    assert sample.loss_mask.tolist() == [1, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert engine.asked == ["3+9=", "3+9=3+9=12:"]
    assert sample.status == Status.COMPLETED


@pytest.mark.parametrize(("text", "status"), [("3+9$", Status.COMPLETED), ("3333", Status.TRUNCATED)])
def test_without_a_call_there_is_no_second_turn(own, text, status):
    sample, engine = answered(own, text)
    assert (len(engine.asked), sample.status) == (1, status)


def test_a_call_that_is_none_is_told_so(own):
    sample, _ = answered(own, "3+=", "?$")
    assert Codec().decode(sample.tokens[4:]) == "3+=?:?$"


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("3+9=", "12"),
        ("3+4=", "07"),
        ("99+99=", "198"),
        ("3+7", "?"),
        ("3*7=", "?"),
        ("3++7=", "?"),
        ("1234+1=", "?"),
        ("__=", "?"),
    ],
)
def test_the_calculator_knows_sums_of_short_numbers_alone(own, call, value):
    assert own.value_of(call) == value


@pytest.mark.parametrize(
    ("completion", "call", "answer"),
    [
        ("3+9=12:12", 1.0, 1.0),
        ("3+9=12:1", 1.0, 0.5),
        ("3+9=12:123", 1.0, 2 / 3),
        ("3+7=10:12", 0.75, 0.0),
        ("3+9=", 1.0, 0.0),
        ("12", 0.0, 0.0),
    ],
)
def test_half_for_the_call_half_for_the_answer_after_the_right_value(own, completion, call, answer):
    task = own.Sums({"most": 9}, 0)
    found = task.score(completion, "12", {"call": "3+9="})
    assert found == {"reward": 0.5 * call + 0.5 * answer, "call": call, "answer": answer}


def test_the_guide_shows_the_recipe_s_function_and_the_recipe_may_start():
    guide = (ROOT / "docs" / "guide" / "own-code.md").read_text()
    code = guide.split("```python\n")[1].split("```")[0]
    assert code.startswith("async def calculator")
    assert code in (ROOT / "recipes" / "calculator.py").read_text()
    recipe = load(RECIPE)
    assert [one for one in check(recipe, facts_of(recipe)) if one.severity == "error"] == []

"""Samples of a step that come from the data: as many as asked, without an engine, resumable."""

from __future__ import annotations

import asyncio
import json

import pytest

from miles.algos.config import AlgoConfig
from miles.algos.step_batches import prepare_steps
from miles.data.config import DataConfig
from miles.data.schedule import ScheduleConfig
from miles.data.supervised.source import ExampleSource
from miles.data.tokenizer import build_char_tokenizer
from miles.rollout.given_answers import GivenAnswers


@pytest.fixture
def opened(tmp_path):
    tokenizer = build_char_tokenizer("0123456789", tmp_path / "tokenizer")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i), "answer": str(i) * (i + 1)}) + "\n" for i in range(8)))
    config = {
        "task": "jsonl",
        "jsonl": {"path": str(path)},
        "held_out_fraction": 0.0,
        "supervised": {"batch_examples": 6},
    }

    def make() -> GivenAnswers:
        return GivenAnswers(ExampleSource(DataConfig.model_validate_json(json.dumps(config)), tokenizer, 1))

    return make


def test_a_step_has_its_examples_and_says_how_far_it_is(opened):
    async def run():
        rollout = opened()
        await rollout.start(3)
        first = await rollout.collect(0)
        await rollout.on_new_version(4)
        return first, await rollout.collect(1)

    first, second = asyncio.run(run())
    assert len(first.samples) == len(second.samples) == 6
    assert (first.weight_version, second.weight_version) == (3, 4)
    assert first.metrics["data/examples"] == 6
    assert first.metrics["data/trained_tokens"] == sum(int(s.loss_mask.sum()) for s in first.samples)
    assert (first.metrics["data/epoch"], second.metrics["data/epoch"]) == (0.75, 1.5)


def test_a_resumed_run_sees_the_next_examples(opened):
    async def run():
        whole, resumed = opened(), opened()
        await whole.collect(0)
        resumed.restore(json.loads(json.dumps(whole.state())))
        return await whole.collect(1), await resumed.collect(1)

    expected, found = asyncio.run(run())
    assert [s.tokens.tolist() for s in expected.samples] == [s.tokens.tolist() for s in found.samples]


def test_examples_are_counted_without_a_reward(opened):
    batch = asyncio.run(opened().collect(0))
    algo = AlgoConfig(loss="sft", reduction="token_mean")
    (step,) = prepare_steps(batch.samples, algo, ScheduleConfig(max_tokens_per_gpu=64)).steps
    assert step.denominators.rollouts == 6
    assert step.denominators.tokens == batch.metrics["data/trained_tokens"]

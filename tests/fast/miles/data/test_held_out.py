"""The hold-out is a share of the prompts, exact on any set, and the same for every seed and order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config import ConfigError
from miles.data.config import DataConfig, JsonlConfig
from miles.data.held_out import held_out_keys, is_held_out
from miles.data.prompts import PromptSource
from miles.data.tokenizer import Tokenizer, build_char_tokenizer

FRACTION = st.floats(0.0, 0.99)


@given(st.sets(st.text(max_size=8), min_size=2, max_size=60), FRACTION)
def test_the_share_is_never_off_by_more_than_one_prompt(keys, fraction):
    held = held_out_keys(keys, fraction)
    assert held <= keys
    assert abs(len(held) - fraction * len(keys)) <= 1
    assert (len(held) == 0) == (fraction == 0.0)
    assert len(held) < len(keys)


@given(st.lists(st.text(max_size=8), max_size=60), FRACTION, st.randoms(use_true_random=False))
def test_order_and_repetition_change_nothing(keys, fraction, random):
    shuffled = [*keys, *keys[:5]]
    random.shuffle(shuffled)
    assert held_out_keys(shuffled, fraction) == held_out_keys(keys, fraction)


def test_a_set_that_grows_keeps_most_of_its_sides():
    keys = [f"prompt {index}" for index in range(2000)]
    before, after = held_out_keys(keys[:1000], 0.1), held_out_keys(keys, 0.1)
    assert len(before & after) > 70


def test_a_task_without_end_is_divided_by_the_same_hash():
    keys = [f"prompt {index}" for index in range(4000)]
    held = {key for key in keys if is_held_out(key, 0.25)}
    assert abs(len(held) - 1000) < 90
    assert len(held & held_out_keys(keys, 0.25)) > 900


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return build_char_tokenizer("0123456789=", tmp_path_factory.mktemp("tokenizer"))


def rows(path, numbers):
    path.write_text("".join(json.dumps({"prompt": f"{n}=", "answer": str(n)}) + "\n" for n in numbers))
    return path


@pytest.mark.parametrize("count", [2, 3, 7, 10, 25])
def test_a_small_file_has_both_sides_whatever_the_seed(tokenizer, tmp_path, count):
    config = DataConfig(task="jsonl", jsonl=JsonlConfig(path=rows(tmp_path / "p.jsonl", range(count))))
    sides = []
    for seed in range(3):
        with PromptSource(config, tokenizer, seed) as source:
            trained = {prompt.text for prompt in source.next_groups(3 * count)}
            drawn = [prompt.text for prompt in source.held_out(2 * count)]
            held = set(drawn)
        assert len(drawn) == len(held), "each row comes once"
        assert not trained & held
        assert len(trained | held) == count
        assert abs(len(held) - count / 10) <= 1
        sides.append(held)
    assert sides[0] == sides[1] == sides[2]


def test_a_file_of_its_own_is_what_is_held_out(tokenizer, tmp_path):
    train, held = rows(tmp_path / "train.jsonl", range(20)), rows(tmp_path / "held.jsonl", [101, 7, 102])
    config = DataConfig(task="jsonl", jsonl=JsonlConfig(path=train), held_out_path=held)
    with PromptSource(config, tokenizer, 0) as source:
        source.look_at_all()
        assert {prompt.text for prompt in source.next_groups(20)} == {f"{n}=" for n in range(20)}
        evaluated = source.held_out(9)
        assert [prompt.text for prompt in evaluated] == ["101=", "7=", "102="]
        assert not {p.prompt_id for p in evaluated} & set(range(10_000)), "an id of a group that training draws"
        (note,) = source.notes()
    assert note.startswith("data.held_out_path: 1 of its prompts are trained on too; ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"held_out_path": Path("x")}, "data.held_out_path has no effect with data.task copy_digits"),
        (
            {"task": "jsonl", "jsonl": {"path": Path("a")}, "held_out_path": Path("x"), "held_out_fraction": 0.2},
            "held_out_fraction has no effect with data.held_out_path",
        ),
    ],
)
def test_a_file_that_nothing_reads_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        DataConfig.model_validate(options)


def test_a_missing_file_is_named_by_its_option(tokenizer, tmp_path):
    train = rows(tmp_path / "train.jsonl", range(4))
    config = DataConfig(task="jsonl", jsonl=JsonlConfig(path=train), held_out_path=tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"data.held_out_path: cannot read .*none\.jsonl: No such file"):
        PromptSource(config, tokenizer, 0)

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from miles.config import ConfigError
from miles.data.config import CopyDigitsConfig, DataConfig, JsonlConfig, ReasoningGymConfig
from miles.data.prompts import PromptSource
from miles.data.tasks import build_task
from miles.data.tokenizer import Tokenizer, build_char_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return build_char_tokenizer("0123456789=abcdefghijklmnopqrstuvwxyz\n", tmp_path_factory.mktemp("tokenizer"))


def test_a_restored_cursor_continues_the_stream(tokenizer):
    source = PromptSource(DataConfig(), tokenizer, seed=3)
    source.next_groups(5)
    state = json.loads(json.dumps(source.state()))
    expected = [p.text for p in source.next_groups(20)]
    resumed = PromptSource(DataConfig(), tokenizer, seed=3)
    resumed.restore(state)
    assert [p.text for p in resumed.next_groups(20)] == expected


def test_a_cursor_of_another_seed_or_task_is_refused(tokenizer):
    state = PromptSource(DataConfig(), tokenizer, seed=3).state()
    with pytest.raises(ConfigError, match="seed is 3 in the checkpoint and 4"):
        PromptSource(DataConfig(), tokenizer, seed=4).restore(state)
    with pytest.raises(ConfigError, match="schema is None"):
        PromptSource(DataConfig(), tokenizer, seed=3).restore({})


def test_held_out_prompts_are_never_trained_by_any_seed(tokenizer):
    held_out = {p.text for seed in (0, 1) for p in PromptSource(DataConfig(), tokenizer, seed).held_out(60)}
    for seed in range(3):
        trained = {p.text for p in PromptSource(DataConfig(), tokenizer, seed).next_groups(1500)}
        assert not trained & held_out
        assert len(trained) > 600
    again = PromptSource(DataConfig(), tokenizer, 0).held_out(10)
    assert [p.text for p in again] == [p.text for p in PromptSource(DataConfig(), tokenizer, 0).held_out(10)]


def test_items_of_long_digit_strings_do_not_overlap(tokenizer):
    config = DataConfig(copy_digits=CopyDigitsConfig(digits=40))
    texts = [p.text for p in PromptSource(config, tokenizer, 0).next_groups(20)]
    pieces = {text[i : i + 12] for text in texts for i in range(28)}
    assert len(pieces) == 20 * 28, "a piece of one prompt reappears in another"


def test_copy_digits_scores_positions(tokenizer):
    source = PromptSource(DataConfig(), tokenizer, 0)
    prompt = source.next_groups(1)[0]
    a = prompt.answer
    assert source.score(a, prompt) == 1.0
    assert source.score(a[:2], prompt) == pytest.approx(2 / 3)
    assert source.score(a + "1", prompt) == pytest.approx(3 / 4)
    assert source.score("", prompt) == 0.0


def test_reasoning_gym_uses_a_short_template_and_is_scored_elsewhere(tokenizer):
    config = DataConfig(
        task="reasoning_gym",
        reasoning_gym=ReasoningGymConfig(params={"min_word_len": 3, "max_word_len": 3}, template="{word}="),
    )
    source = PromptSource(config, tokenizer, 0)
    prompt = source.next_groups(1)[0]
    assert prompt.text == prompt.answer[::-1] + "="
    with pytest.raises(RuntimeError, match="they run in worker processes"):
        source.score(prompt.answer, prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "spell_backwards"}, "did you mean spell_backward"),
        ({"params": {"seed": 1}}, r"params\.seed: set by the run"),
        ({"params": {"colour": 1}}, "refuses"),
        ({"template": "{wrd}="}, "no field 'wrd'.*word"),
    ],
)
def test_bad_reasoning_gym_options_are_named(tokenizer, options, message):
    config = DataConfig(task="reasoning_gym", reasoning_gym=ReasoningGymConfig(**options))
    with pytest.raises(ConfigError, match=message):
        PromptSource(config, tokenizer, 0).next_groups(1)


def write_lines(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return DataConfig(task="jsonl", jsonl=JsonlConfig(path=path), held_out_fraction=0.0)


def test_jsonl_covers_each_line_once_an_epoch_in_a_seeded_order(tokenizer, tmp_path):
    rows = [{"prompt": f"{i}=", "answer": str(i), "level": i} for i in range(12)]
    config = write_lines(tmp_path / "p.jsonl", *rows)
    source = PromptSource(config, tokenizer, 1)
    first, second = ([p.text for p in source.next_groups(12)] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(r["prompt"] for r in rows)
    assert first != second
    assert PromptSource(config, tokenizer, 1).next_groups(1)[0].metadata["level"] in range(12)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (('{"prompt": "1=", "answer": "1"}', "{oops"), "p.jsonl:2: not JSON"),
        (('{"prompt": "1="}',), "p.jsonl:1: nothing under 'answer'.*add it, or name the key of answers by answer_key"),
        (("[1]",), "p.jsonl:1: expected a JSON object, got list"),
        (('{"answer": "1"}',), "p.jsonl:1: no text under 'prompt'.*name the key of prompts by prompt_key"),
        (('{"prompt": 1, "answer": 1}',), "p.jsonl:1: 'prompt' is 1, not text; quote it"),
        (('{"prompt": [], "answer": 1}',), "'prompt' is a list, not text; for messages, set messages_key to prompt"),
        (('{"prompt": "", "answer": 1}',), "p.jsonl:1: 'prompt' is empty; write a prompt, or remove the row"),
        ((r'{"prompt": "1=", "answer": {"a": ["\ud800"]}}',), r"p.jsonl:1: 'answer' holds \\ud800, half of"),
        (
            ('{"prompt": "1=", "answer": "1", "n": ' + "9" * 5000 + "}",),
            "p.jsonl:1: a number has too many digits to be read; quote it",
        ),
        (("[" * 100_000,), "p.jsonl:1: nested too deeply; write a row of a few levels"),
        ((r'{"prompt": "\ud800", "answer": "1"}',), r"p.jsonl:1: 'prompt' holds \\ud800, half of a surrogate pair"),
        (("",), "holds no prompts"),
    ],
)
def test_bad_prompt_files_name_the_line(tokenizer, tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        PromptSource(write_lines(tmp_path / "p.jsonl", *lines), tokenizer, 0)


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x7f"])
def test_only_a_newline_ends_a_row_and_a_byte_order_mark_is_passed_over(tmp_path, inside):
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": f"a{inside}b", "answer": "c"}, {"prompt": "d", "answer": "e"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    task = build_task(DataConfig(task="jsonl", jsonl=JsonlConfig(path=path, shuffle=False)), 0)
    assert [task.item(index).text for index in range(2)] == [f"a{inside}b", "d"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)
)
_ROW = st.dictionaries(st.sampled_from(["prompt", "answer", "other"]), _JSON).map(json.dumps).map(str.encode)


@given(st.lists(st.binary(max_size=30) | _ROW | st.just(b'{"prompt": "1", "answer": "2"}'), max_size=4))
def test_any_file_is_read_or_refused_with_its_name(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(b"\n".join(lines))
    said = "any.jsonl"
    try:
        task = build_task(DataConfig(task="jsonl", jsonl=JsonlConfig(path=path)), 0)
        texts = [task.item(index).text for index in range(task.size)]
    except ConfigError as error:
        said, texts = str(error), []
    assert "any.jsonl" in said
    assert "".join(texts).encode().decode() == "".join(texts)


def test_a_missing_prompt_file_is_named(tokenizer, tmp_path):
    config = DataConfig(task="jsonl", jsonl=JsonlConfig(path=tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl"):
        PromptSource(config, tokenizer, 0)
    with pytest.raises(ValidationError, match=r"data\.jsonl\.path is not set"):
        DataConfig(task="jsonl")


def test_a_prompt_over_the_limit_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"has 4 tokens, allowed are 1 to data\.max_prompt_tokens=3"):
        PromptSource(DataConfig(max_prompt_tokens=3), tokenizer, 0).next_groups(1)


def test_too_few_distinct_prompts_for_the_split_are_reported(tokenizer):
    config = DataConfig(copy_digits=CopyDigitsConfig(digits=1), held_out_fraction=1e-9)
    with pytest.raises(ConfigError, match="no prompt of task copy_digits is held out"):
        PromptSource(config, tokenizer, 0).held_out(1)


def test_prompts_are_token_ids(tokenizer):
    prompt = PromptSource(DataConfig(), tokenizer, 0).next_groups(1)[0]
    assert prompt.input_ids.dtype == np.int64
    assert tokenizer.decode(prompt.input_ids) == prompt.text

"""Examples: which tokens of a row are learnt, in which order a run sees them, and rows that are no examples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.config import ConfigError
from miles.data.config import DataConfig
from miles.data.prompts import PromptSource
from miles.data.sample import validate_sample
from miles.data.supervised.source import ExampleSource
from miles.data.tokenizer import Tokenizer, build_char_tokenizer
from miles.models import registry

LETTERS = "".join(map(chr, range(32, 127))) + "\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return build_char_tokenizer(LETTERS, tmp_path_factory.mktemp("tokenizer"), chat=registry.chat_format("qwen3"))


def turns(*texts: str, system: str | None = None) -> dict:
    roles = ("user", "assistant")
    messages = [{"role": roles[k % 2], "content": text} for k, text in enumerate(texts)]
    return {"messages": ([] if system is None else [{"role": "system", "content": system}]) + messages}


def asks(prompt: str, answer: str) -> dict:
    return {"prompt": prompt, "answer": answer}


def data(folder: Path, rows, **options) -> DataConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"path": str(path), **({"messages_key": "messages"} if "messages" in rows[0] else {})}
    section |= options.pop("jsonl", {})
    config = {"task": "jsonl", "jsonl": section, "held_out_fraction": 0.0, **options}
    return DataConfig.model_validate_json(json.dumps(config))


def source(folder: Path, tokenizer, rows, *, seed=0, **options) -> ExampleSource:
    return ExampleSource(data(folder, rows, **options), tokenizer, seed)


def learnt(tokenizer, sample) -> str:
    """The text of the learnt tokens, special ones shown, answers side by side."""
    response = sample.tokens[sample.prompt_length :]
    return tokenizer.decode(response[sample.loss_mask == 1], skip_special=False)


def test_every_answer_is_learnt_up_to_its_end_and_nothing_else(tmp_path, tokenizer):
    (sample,) = source(tmp_path, tokenizer, [turns("2+2?", "It is 4", "+1?", "5")]).next_samples(1)
    validate_sample(sample)
    assert learnt(tokenizer, sample) == "It is 4<|im_end|>5<|im_end|>"
    prompt = tokenizer.decode(sample.tokens[: sample.prompt_length], skip_special=False)
    assert prompt == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    # The line end behind the last answer is not even read.
    assert sample.tokens[-1] == tokenizer.eos_id


def test_the_last_answer_alone(tmp_path, tokenizer):
    rows = [turns("2+2?", "It is 4", "+1?", "5")]
    (sample,) = source(tmp_path, tokenizer, rows, supervised={"answers": "last"}).next_samples(1)
    assert learnt(tokenizer, sample) == "5<|im_end|>"
    assert sample.loss_mask.all()


def test_a_prompt_has_the_ids_that_a_rollout_of_it_has(tmp_path, tokenizer):
    rows, options = [turns("2+2?", "4")], {"system_prompt": "Add."}
    (sample,) = source(tmp_path, tokenizer, rows, **options).next_samples(1)
    asked = tmp_path / "asked"
    asked.mkdir()
    asking = [{"messages": rows[0]["messages"][:1]}]
    with PromptSource(data(asked, asking, jsonl={"answer_key": None}, **options), tokenizer, 0) as prompts:
        (prompt,) = prompts.next_groups(1)
    assert sample.tokens[: sample.prompt_length].tolist() == prompt.input_ids.tolist()


def test_prompts_and_answers_may_be_text(tmp_path, tokenizer):
    rows = [{"prompt": "abc=", "answer": "cba"}]
    (sample,) = source(tmp_path, tokenizer, rows).next_samples(1)
    assert sample.tokens.tolist() == [*tokenizer.encode("abc=cba").tolist(), tokenizer.eos_id]
    assert (sample.prompt_length, sample.loss_mask.tolist()) == (4, [1, 1, 1, 1])
    (chat,) = source(tmp_path, tokenizer, rows, chat_template="tokenizer").next_samples(1)
    assert learnt(tokenizer, chat) == "cba<|im_end|>"


def test_an_epoch_has_every_example_once_in_an_order_of_the_seed(tmp_path, tokenizer):
    rows = [asks(str(i), f"{i}!") for i in range(10)]

    def order(seed, count=20, **options):
        return [
            learnt(tokenizer, s) for s in source(tmp_path, tokenizer, rows, seed=seed, **options).next_samples(count)
        ]

    first = order(1)
    assert sorted(first[:10]) == sorted(first[10:]) == sorted(f"{i}!<|im_end|>" for i in range(10))
    assert first[:10] != first[10:]
    assert first == order(1) != order(2)
    assert order(1, 10, jsonl={"shuffle": False}) == [f"{i}!<|im_end|>" for i in range(10)]


@settings(max_examples=10)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 5))
def test_a_resumed_stream_goes_on_with_the_next_example(tmp_path_factory, tokenizer, batches, then):
    folder = tmp_path_factory.mktemp("resumed")
    rows = [{"prompt": str(i), "answer": str(i)} for i in range(7)]
    whole = source(folder, tokenizer, rows, seed=3)
    seen = [sample for batch in batches for sample in whole.next_samples(batch)]
    other = source(folder, tokenizer, rows, seed=3)
    other.restore(json.loads(json.dumps(whole.state())))
    expected, found = whole.next_samples(then), other.next_samples(then)
    assert [(s.sample_id, s.tokens.tolist()) for s in expected] == [(s.sample_id, s.tokens.tolist()) for s in found]
    ids = [sample.rollout_id for sample in [*seen, *expected]]
    assert ids == list(range(len(ids)))
    assert other.epoch == pytest.approx(len(ids) / 7)


def test_the_cursor_of_another_seed_is_refused(tmp_path, tokenizer):
    rows = [asks("1", "1")]
    state = source(tmp_path, tokenizer, rows, seed=1).state()
    with pytest.raises(ConfigError, match="seed is 1 in the checkpoint and 2 in this run"):
        source(tmp_path, tokenizer, rows, seed=2).restore(state)


def test_the_prompts_that_a_task_holds_out_are_held_out_here_too(tmp_path, tokenizer):
    rows = [turns(f"{i}?", str(i)) for i in range(30)]
    opened = source(tmp_path, tokenizer, rows, held_out_fraction=0.2)
    assert (len(opened.training), len(opened.held_out)) == (24, 6)
    held = {example.tokens[: example.prompt_length].tobytes() for example in opened.held_out}
    asked = tmp_path / "asked"
    asked.mkdir()
    asking = [{"messages": row["messages"][:1]} for row in rows]
    with PromptSource(data(asked, asking, held_out_fraction=0.2, jsonl={"answer_key": None}), tokenizer, 0) as prompts:
        assert {prompt.input_ids.tobytes() for prompt in prompts.held_out(6)} == held


def test_held_out_examples_may_have_a_file_of_their_own(tmp_path, tokenizer):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in [turns("9?", "9"), turns("1?", "1")]))
    opened = source(tmp_path, tokenizer, [turns("1?", "1")], held_out_path=str(other), held_out_fraction=0.1)
    assert (len(opened.training), len(opened.held_out)) == (1, 2)
    (note,) = opened.notes()
    assert note.startswith("data.held_out_path: 1 of its prompts are trained on too")


def test_examples_above_the_limit_stop_the_run_or_are_left_out_and_told(tmp_path, tokenizer):
    rows = [asks("1", "1"), asks("2", "2" * 50), asks("3", "3" * 60)]
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:2: the example has \d+ tokens, above data.supervised.max_tokens=40"
    ):
        source(tmp_path, tokenizer, rows, supervised={"max_tokens": 40})
    opened = source(tmp_path, tokenizer, rows, supervised={"max_tokens": 40}, too_long="drop")
    assert len(opened.training) == 1
    assert opened.longest <= 40
    (note,) = opened.notes()
    assert note.startswith("data.too_long=drop: 2 examples have more than data.supervised.max_tokens=40")
    assert "rows.jsonl:2" in note
    with pytest.raises(ConfigError, match="every example is held out or left out"):
        source(tmp_path, tokenizer, rows[1:], supervised={"max_tokens": 40}, too_long="drop")


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([turns("1")], {}, r"rows.jsonl:1: messages ends with a user message, so its last answer is missing"),
        ([turns("1", "<|im_end|>")], {}, r"rows.jsonl:1: the text holds '<\|im_end\|>'"),
        ([{"prompt": "1", "answer": 3}], {}, "'answer' is 3, not text; quote it"),
        ([{"prompt": "1"}], {}, "no text under 'answer'"),
        ([{"prompt": "1", "answer": "1"}], {"jsonl": {"answer_key": None}}, "answer_key is null, but answers are what is learnt"),
        ([{"prompt": "é", "answer": "1"}], {}, "rows.jsonl:1: tokenizer: 'é' has characters without a token"),
        ([turns("1", "1")], {"task": "copy_digits", "jsonl": {}}, None),
    ],
)  # fmt: skip
def test_rows_that_are_no_examples_are_refused_with_their_place(tmp_path, tokenizer, rows, options, said):
    if said is None:
        with pytest.raises(ConfigError, match=r"data.task is copy_digits, which asks and gives no answers to learn"):
            ExampleSource(DataConfig(), tokenizer, 0)
        return
    with pytest.raises(ConfigError, match=said):
        source(tmp_path, tokenizer, rows, **options)


def test_a_template_that_ends_no_answer_is_refused(tmp_path, tokenizer):
    template = tmp_path / "endless.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")  # fmt: skip
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the chat template writes no end token"):
        source(tmp_path, tokenizer, [turns("1", "2")], chat_template=str(template))


def test_a_template_without_a_word_before_the_answer_is_refused(tmp_path, tokenizer):
    template = tmp_path / "bare.jinja"
    template.write_text("{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}")  # fmt: skip
    with pytest.raises(ConfigError, match="nothing comes before the first answer"):
        source(tmp_path, tokenizer, [turns("1", "2")], chat_template=str(template))


def test_end_tokens_of_the_model_end_answers_too(tmp_path, tokenizer):
    template = tmp_path / "other_end.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %};{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")  # fmt: skip
    config = data(tmp_path, [turns("1", "2")], chat_template=str(template))
    opened = ExampleSource(config, tokenizer, 0, end_ids=[int(tokenizer.encode(";")[0])])
    assert learnt(tokenizer, opened.next_samples(1)[0]) == "2;"


def test_masks_are_bytes_of_zero_and_one(tmp_path, tokenizer):
    (sample,) = source(tmp_path, tokenizer, [turns("a", "b", "c", "d")]).next_samples(1)
    assert sample.loss_mask.dtype == np.uint8
    assert 0 < sample.loss_mask.sum() < len(sample.loss_mask)

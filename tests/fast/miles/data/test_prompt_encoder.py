"""A prompt becomes token ids once: templates, system prompts, special tokens in contents, and the limit on its length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.config import ConfigError
from miles.data.config import DataConfig
from miles.data.prompt_encoder import PromptEncoder
from miles.data.prompts import PromptSource
from miles.data.tokenizer import Tokenizer, build_char_tokenizer
from miles.models import registry

LETTERS = "".join(map(chr, range(32, 127))) + "\né"
ONE_LINE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>{{ mood }}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return build_char_tokenizer(LETTERS, tmp_path_factory.mktemp("tokenizer"), chat=registry.chat_format("qwen3"))


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("template") / "one_line.jinja"
    path.write_text(ONE_LINE)
    return str(path)


def source(folder: Path, tokenizer, rows, **options) -> PromptSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"shuffle": False, "answer_key": None}
    if "messages" in rows[0]:
        names["messages_key"] = "messages"
    config = {"task": "jsonl", "jsonl": {"path": str(path), **names}, "held_out_fraction": 0.0, **options}
    return PromptSource(DataConfig.model_validate_json(json.dumps(config)), tokenizer, 0)


def prompts(folder: Path, tokenizer, rows, **options):
    with source(folder, tokenizer, rows, **options) as opened:
        opened.look_at_all()
        return opened.next_groups(len(rows))


def asks(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


def test_messages_become_the_template_s_ids_with_one_generation_prompt(tmp_path, tokenizer):
    (prompt,) = prompts(tmp_path, tokenizer, [asks("1+2?")])
    assert prompt.text == "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.input_ids.tolist() == tokenizer.encode(prompt.text).tolist()
    start, end = (tokenizer.id_of(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert [i for i in prompt.input_ids.tolist() if i in (start, end)] == [start, end, start]
    assert end == tokenizer.eos_id


def test_plain_text_stays_as_it_is_unless_it_is_to_be_a_conversation(tmp_path, tokenizer, template):
    rows = [{"prompt": "1+2?"}]
    assert prompts(tmp_path, tokenizer, rows)[0].text == "1+2?"
    wrapped = "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"
    assert prompts(tmp_path, tokenizer, rows, chat_template="tokenizer")[0].text == wrapped
    assert (
        prompts(tmp_path, tokenizer, rows, system_prompt="Add.")[0].text
        == f"<|im_start|>system\nAdd.<|im_end|>\n{wrapped}"
    )
    found = prompts(
        tmp_path, tokenizer, rows, chat_template=template, system_prompt="Add.", chat_template_kwargs={"mood": "!"}
    )
    assert found[0].text == "[system]Add.[user]1+2?>!"


def test_arguments_of_the_template_reach_it(tmp_path, tokenizer):
    rows = [asks("1+2?")]
    (prompt,) = prompts(tmp_path, tokenizer, rows, chat_template_kwargs={"enable_thinking": False})
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("row", "options"),
    [
        (asks("a<|im_end|>b"), {}),
        ({"prompt": "a<|im_end|>b"}, {"chat_template": "tokenizer"}),
        ({"messages": [{"role": "user", "content": "x", "name": "<|im_end|>"}]}, {}),
        (asks("x"), {"system_prompt": "a<|im_end|>b"}),
        ({"messages": [{"role": "system", "content": "<|im_"}, {"role": "user", "content": "end|>"}]}, {}),
    ],
)
def test_a_special_token_in_a_content_is_refused_with_its_place(tmp_path, tokenizer, row, options):
    with pytest.raises(ConfigError) as raised:
        prompts(tmp_path, tokenizer, [row], **options)
    assert f"{tmp_path}/rows.jsonl:1: the text holds '<|im_end|>', a special token of the tokenizer" in str(
        raised.value
    )


def test_a_special_token_in_plain_text_is_the_writer_s_own(tmp_path, tokenizer):
    (prompt,) = prompts(tmp_path, tokenizer, [{"prompt": "<|im_start|>user"}])
    assert prompt.input_ids[0] == tokenizer.id_of("<|im_start|>")


def test_faults_name_the_first_row_that_has_one_whatever_the_order(tmp_path, tokenizer):
    rows = [asks("ok"), asks("unknown ☃"), asks("worse ☃☃")]
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: tokenizer: .* without a token: \['☃'\]"):
        prompts(tmp_path, tokenizer, rows)
    rows = [asks("ok"), {"messages": [{"role": "system", "content": "x"}, *asks("x")["messages"]]}]
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: .*system message of its own"):
        prompts(tmp_path, tokenizer, rows, system_prompt="Add.")


def test_a_template_s_fault_has_row_and_line(tmp_path, tokenizer):
    bad = tmp_path / "bad.jinja"
    bad.write_text("{%- for m in messages %}\n{{ m.content.upper().nothing.more }}\n{% endfor %}")
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:1: .*bad\.jinja: line 2: UndefinedError: .*; mend the template"
    ):
        prompts(tmp_path, tokenizer, [asks("x")], chat_template=str(bad))


def test_conversations_need_a_tokenizer_s_files(tmp_path):
    class Counts:
        def encode(self, text):
            raise AssertionError("not reached")

    with pytest.raises(ConfigError, match=r"conversations need the files of a tokenizer; set model.path"):
        prompts(tmp_path, Counts(), [asks("x")])


def test_longer_prompts_are_an_error_left_out_or_cut_and_always_told(tmp_path, tokenizer):
    rows = [{"prompt": "123"}, {"prompt": "123456"}, {"prompt": "12345"}, {"prompt": "12"}]
    with pytest.raises(ConfigError) as raised:
        prompts(tmp_path, tokenizer, rows, max_prompt_tokens=4)
    assert str(raised.value) == (
        f"{tmp_path}/rows.jsonl:2 has 6 tokens, allowed are 1 to data.max_prompt_tokens=4; raise it, shorten the prompt, or "
        "set data.too_long to drop or truncate_left"
    )
    with source(tmp_path, tokenizer, rows, max_prompt_tokens=4, too_long="drop") as opened:
        opened.look_at_all()
        assert [p.text for p in opened.next_groups(4)] == ["123", "12", "123", "12"]
        (note,) = opened.notes()
    assert note == (
        "data.too_long=drop: 2 prompts have more than data.max_prompt_tokens=4 tokens and are left out: "
        f"{tmp_path}/rows.jsonl:2 (6 tokens), {tmp_path}/rows.jsonl:3 (5 tokens); raise data.max_prompt_tokens to keep them "
        "whole"
    )
    with source(tmp_path, tokenizer, rows, max_prompt_tokens=4, too_long="truncate_left") as opened:
        cut = opened.next_groups(4)
        assert opened.too_long.count == 2
        assert "and are cut at their beginning: " in opened.notes()[0]
    assert [tokenizer.decode(p.input_ids) for p in cut] == ["123", "3456", "2345", "12"]
    with source(tmp_path, tokenizer, rows, max_prompt_tokens=6, too_long="drop") as opened:
        opened.look_at_all()
        assert opened.notes() == []


def test_many_long_prompts_are_counted_and_the_first_listed(tmp_path, tokenizer):
    rows = [{"prompt": f"{n:06}"} for n in range(30)] + [{"prompt": "1"}]
    with source(tmp_path, tokenizer, rows, max_prompt_tokens=4, too_long="drop") as opened:
        opened.look_at_all()
        (note,) = opened.notes()
    assert "30 prompts" in note
    assert note.count("rows.jsonl:") == 20
    assert ", ...; " in note


def test_prompts_left_out_are_not_held_out_either(tmp_path, tokenizer):
    rows = [{"prompt": f"{n:06}"} for n in range(20)] + [{"prompt": f"{n}"} for n in range(40)]
    options = {"max_prompt_tokens": 4, "too_long": "drop", "held_out_fraction": 0.25}
    with source(tmp_path, tokenizer, rows, **options) as opened:
        assert len({p.text for p in opened.held_out(60)}) == 10
        assert len({p.text for p in opened.next_groups(90)}) == 30


def test_conversations_are_rendered_once_and_the_process_ends_with_the_source(tmp_path, tokenizer, monkeypatch):
    calls = []
    encode = PromptEncoder.encode
    monkeypatch.setattr(
        PromptEncoder, "encode", lambda self, item, *, place: calls.append(1) or encode(self, item, place=place)
    )
    rows = [asks("1"), asks("2"), asks("1")]
    with source(tmp_path, tokenizer, rows) as opened:
        assert len(opened.next_groups(12)) == 12
        renderer = opened._encoder._renderer
    assert len(calls) == 2, "one a distinct prompt"
    assert renderer._process is None

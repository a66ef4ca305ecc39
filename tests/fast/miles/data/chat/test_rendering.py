"""Prompts of conversations are those of `transformers`, for every template that an installed package carries and ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import CALL, PLAIN, SPECIAL, TEMPLATES, TOOL, byte_tokenizer, says
from transformers.utils.chat_template_utils import render_jinja_template

from miles.data.chat import ChatRenderer, Conversation, read_template, render_process
from miles.data.tokenizer import Tokenizer

# Those that read the clock whatever they are given.
CLOCKS = {name for name, source in TEMPLATES.items() if "strftime_now" in source and "date_string" not in source}
CONVERSATIONS = {
    "one_turn": ([says("user", "How many?\n")], None),
    "system": ([says("system", "Be brief."), says("user", 'How many, "really"? é 漢 <b>')], None),
    "several_turns": (
        [
            says("user", " Hi "),
            says("assistant", "Hello."),
            says("user", "2+2?"),
            says("assistant", "4"),
            says("user", "+1?"),
        ],
        None,
    ),
    "thinking": (
        [says("user", "Hi"), says("assistant", "Yes.", reasoning_content="Hm."), says("user", "Sure?")],
        None,
    ),
    "tools": ([says("system", "Use tools."), says("user", "1+2?")], [TOOL]),
    "a_tool_was_called": (
        [says("user", "1+2?"), says("assistant", "", tool_calls=[CALL]), says("tool", "3", tool_call_id="call12345")],
        [TOOL],
    ),
    "no_content_beside_a_call": (
        [says("user", "1+2?"), {"role": "assistant", "tool_calls": [CALL]}, says("tool", "3", name="add")],
        [TOOL],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer(folder)


class InThisProcess:
    """Renders by the code of the rendering process, without its start."""

    def __init__(self, folder: Path, template: str, **arguments: object) -> None:
        file = folder / "any.jinja"
        file.write_text(template)
        found = read_template(folder, file=file, arguments=arguments)
        self._setup = {
            "template": found.source,
            "with_tools": None,
            "variables": found.variables,
            "max_characters": 9999,
        }

    def __call__(self, conversation: Conversation) -> dict[str, object]:
        request = {"messages": conversation.messages, "tools": conversation.tools}
        return render_process.answer(render_jinja_template, json.loads(json.dumps(request)), self._setup)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_ids_are_those_of_transformers(folder, tokenizer, theirs, name) -> None:
    compared, template = 0, TEMPLATES[name]
    for arguments in ({"date_string": "1 Jan 2026"}, {"enable_thinking": False, "date_string": "1 Jan 2026"}):
        render = InThisProcess(folder, template, **arguments)
        for case, (messages, tools) in CONVERSATIONS.items():
            reply = render(Conversation.of(messages, tools, place="row 1"))
            try:
                options = {"add_generation_prompt": True, "return_dict": False, **arguments}
                expected = theirs.apply_chat_template(messages, tools=tools, chat_template=template, **options)
            except Exception:
                assert "error" in reply, case
                continue
            if reply.get("clock"):
                continue
            assert tokenizer.encode(reply["text"]).tolist() == expected, case
            compared += 1
    assert compared >= 2 or name in CLOCKS


def test_a_template_that_reads_the_clock_is_refused_with_the_way_out(folder) -> None:
    render = InThisProcess(folder, "{{ strftime_now('%d') }}{{ messages[0].content }}")
    reply = render(Conversation.of([says("user", "x")], place="r"))
    assert (reply["error"], reply["line"], reply["clock"]) == ("it reads the clock", 1, True)


_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=20).filter(
    lambda text: text.strip() != "" and not any(token in text for token in SPECIAL)
)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    messages = [says("system", draw(_TEXT))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 2))):
        messages += [says("user", draw(_TEXT)), says("assistant", draw(_TEXT))]
    messages.append(says("user", draw(_TEXT)))
    tools = [TOOL] if draw(st.booleans()) else None
    return Conversation.of(messages, tools, place="row 1")


@pytest.mark.parametrize("name", ["ours_qwen3", "qwen3", "plain"])
@settings(max_examples=40)
@given(conversation=conversations())
def test_any_conversation_has_the_ids_of_transformers(renderers, tokenizer, theirs, name, conversation) -> None:
    expected = theirs.apply_chat_template(
        list(conversation.messages),
        tools=None if conversation.tools is None else list(conversation.tools),
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        return_dict=False,
    )
    text = renderers[name].render(conversation, place="row 1")
    assert tokenizer.encode(text).tolist() == expected
    if name != "plain":
        assert text.endswith("<|im_start|>assistant\n")
        assert text.count("<|im_start|>assistant\n") == 1 + sum(m["role"] == "assistant" for m in conversation.messages)


@pytest.fixture(scope="module")
def renderers(folder):
    made = {}
    for name in ("ours_qwen3", "qwen3", "plain"):
        file = folder / f"{name}.any.jinja"
        file.write_text(TEMPLATES[name])
        made[name] = ChatRenderer(read_template(folder, file=file, arguments={}))
    yield made
    for renderer in made.values():
        renderer.close()


def test_the_tokenizers_own_template_is_found_as_transformers_finds_it(folder, tmp_path) -> None:
    from transformers import AutoTokenizer

    for file in folder.glob("tokenizer*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings_file = tmp_path / "tokenizer_config.json"
    plain = json.loads(settings_file.read_text())
    messages, tools = CONVERSATIONS["tools"]
    two = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TEMPLATES["qwen3"]}]
    for found, beside in ((PLAIN, None), (two, None), (PLAIN, TEMPLATES["qwen3"])):
        settings_file.write_text(json.dumps({**plain, "chat_template": found}))
        if beside is not None:
            (tmp_path / "chat_template.jinja").write_text(beside)
        peer = AutoTokenizer.from_pretrained(tmp_path)
        for given_tools in (None, tools):
            expected = peer.apply_chat_template(messages, tools=given_tools, tokenize=False, add_generation_prompt=True)
            with ChatRenderer(read_template(tmp_path, file=None, arguments={})) as renderer:
                assert renderer.render(Conversation.of(messages, given_tools, place="r"), place="r") == expected


def test_older_files_name_special_tokens_as_transformers_reads_them(folder, tmp_path) -> None:
    from transformers import AutoTokenizer

    for file in folder.glob("tokenizer*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|user|>"}}))
    template = read_template(tmp_path, file=None, arguments={}) if (tmp_path / "chat_template.jinja").exists() else None
    assert template is None
    (tmp_path / "chat_template.jinja").write_text(PLAIN)
    template = read_template(tmp_path, file=None, arguments={})
    assert dict(template.variables) == AutoTokenizer.from_pretrained(tmp_path).special_tokens_map
    assert template.variables["bos_token"] == "<|user|>"
    settings_file = tmp_path / "tokenizer_config.json"
    newer = {**json.loads(settings_file.read_text()), "added_tokens_decoder": {}}
    settings_file.write_text(json.dumps(newer))
    template = read_template(tmp_path, file=None, arguments={})
    assert dict(template.variables) == AutoTokenizer.from_pretrained(tmp_path).special_tokens_map
    assert template.variables["bos_token"] == "<s>"


def test_arguments_reach_the_template_and_win_over_special_tokens(folder) -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
    render = InThisProcess(folder, template, mood="calm", bos_token="B")
    assert render(Conversation.of([says("user", "x")], place="r")) == {"text": "B<|im_end|>calmx", "answers": []}

"""Which tokens of a conversation its assistants wrote: those of `transformers`, and of templates that do not say it."""

from __future__ import annotations

import numpy as np
import pytest
from templates import CALL, SPECIAL, TEMPLATES, TOOL, byte_tokenizer, says
from transformers.utils.chat_template_utils import render_jinja_template

from miles.config import ConfigError
from miles.data.chat import ChatRenderer, ChatTemplate, Conversation, read_template, render_process
from miles.data.config import DataConfig
from miles.data.prompt_encoder import PromptEncoder
from miles.data.tokenizer import Tokenizer

ANSWERED = {
    "one_turn": ([says("user", "Hi"), says("assistant", "Hello.")], None),
    "several_turns": (
        [says("system", "Be brief."), says("user", "2+2?"), says("assistant", "4 é 漢"), says("user", "+1?"), says("assistant", "5")],
        None,
    ),
    "a_tool_was_called": (
        [
            says("user", "1+2?"),
            says("assistant", "", tool_calls=[CALL]),
            says("tool", "3", tool_call_id="call12345"),
            says("assistant", "It is 3."),
        ],
        [TOOL],
    ),
}  # fmt: skip
MARKED = sorted(name for name, source in TEMPLATES.items() if "generation %}" in source or "generation -%}" in source)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("answers"))


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def marked(folder, template: str, messages, tools=None) -> tuple[np.ndarray, np.ndarray]:
    file = folder / "any.jinja"
    file.write_text(template)
    encoder = PromptEncoder(
        DataConfig(chat_template=str(file), chat_template_kwargs={"date_string": "1"}), Tokenizer(folder)
    )
    try:
        return encoder.encode_answered(Conversation.of(messages, tools, place="r", answered=True), place="r")
    finally:
        encoder.close()


def test_most_templates_for_training_are_compared():
    assert len(MARKED) > 20
    assert "ours_qwen3" in MARKED


@pytest.mark.parametrize("name", MARKED)
def test_generation_blocks_are_read_as_transformers_reads_them(folder, theirs, name):
    file = folder / "any.jinja"
    file.write_text(TEMPLATES[name])
    template, tokenizer = read_template(folder, file=file, arguments={"date_string": "1"}), Tokenizer(folder)
    setup = {"template": template.source, "with_tools": None, "variables": template.variables, "max_characters": 9999}
    compared = 0
    for messages, tools in ANSWERED.values():
        reply = render_process.answer(
            render_jinja_template, {"messages": messages, "tools": tools, "answered": True}, setup
        )
        try:
            expected = theirs.apply_chat_template(
                messages, tools=tools, chat_template=TEMPLATES[name], date_string="1", return_dict=True,
                return_assistant_tokens_mask=True,
            )  # fmt: skip
        except Exception:
            assert "error" in reply
            continue
        if reply.get("clock"):
            continue
        ids, mask = tokenizer.encode_marked(reply["text"], reply["answers"])
        assert ids.tolist() == expected["input_ids"]
        assert mask.tolist() == [bool(value) for value in expected["assistant_masks"]]
        assert 0 < mask.sum() < len(mask)
        compared += 1
    # That one takes lists of parts from assistants, and no text.
    assert compared or "strftime_now" in TEMPLATES[name] or name == "llava_next_training"


def test_a_template_without_blocks_gives_the_answers_that_one_with_blocks_gives(folder):
    for case in ("one_turn", "several_turns"):
        messages, tools = ANSWERED[case]
        plain = TEMPLATES["ours_qwen3"].replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
        assert "generation %}" not in plain
        with_blocks, without = (
            marked(folder, TEMPLATES["ours_qwen3"], messages, tools),
            marked(folder, plain, messages, tools),
        )
        assert without[0].tolist() == with_blocks[0].tolist()
        assert without[1].tolist() == with_blocks[1].tolist()


def test_marks_are_the_assistants_texts_and_the_ends_of_their_turns(folder):
    tokenizer = Tokenizer(folder)
    ids, mask = marked(folder, TEMPLATES["ours_qwen3"], *ANSWERED["several_turns"])
    assert tokenizer.decode(ids[mask], skip_special=False) == "4 é 漢<|im_end|>\n5<|im_end|>\n"
    assert tokenizer.decode(ids[~mask], skip_special=False).endswith("+1?<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_changes_earlier_turns_must_say_what_was_written(folder):
    forgets = "{% for m in messages %}{% if loop.last or m.role == 'user' %}[{{ m.content }}]{% endif %}{% endfor %}"
    with pytest.raises(
        ConfigError, match=r"r: .*any\.jinja: ValueError: it writes messages .* messages\[2\] otherwise .*generation"
    ):
        marked(folder, forgets, ANSWERED["several_turns"][0])
    with pytest.raises(ConfigError, match="writes nothing of the assistants; mend the template"):
        marked(folder, "{% generation %}{% endgeneration %}x", ANSWERED["one_turn"][0])


def test_an_answered_conversation_ends_with_an_answer():
    with pytest.raises(
        ConfigError, match="p:1: messages ends with a user message, so its last answer is missing; end it"
    ):
        Conversation.of([says("user", "x")], place="p:1", answered=True)
    with pytest.raises(ConfigError, match="nothing is left to answer"):
        Conversation.of(ANSWERED["one_turn"][0], place="p:1")


def test_special_tokens_and_the_system_prompt_are_as_in_prompts(folder):
    with pytest.raises(ConfigError, match=r"r: the text holds '<\|im_end\|>', a special token"):
        marked(folder, TEMPLATES["ours_qwen3"], [says("user", "x"), says("assistant", SPECIAL[1])])
    encoder = PromptEncoder(
        DataConfig(system_prompt="Add.", chat_template=str(folder / "any.jinja")), Tokenizer(folder)
    )
    (folder / "any.jinja").write_text(TEMPLATES["ours_qwen3"])
    ids, _ = encoder.encode_answered(Conversation.of(ANSWERED["one_turn"][0], place="r", answered=True), place="r")
    encoder.close()
    assert Tokenizer(folder).decode(ids).startswith("system\nAdd.")


def test_prompts_are_rendered_as_before_beside_answers(folder):
    with ChatRenderer(ChatTemplate(TEMPLATES["ours_qwen3"], "t")) as renderer:
        prompt = Conversation.of([says("user", "Hi")], place="r")
        assert renderer.render(prompt, place="r").endswith("assistant\n")
    assert read_template(folder, file=folder / "any.jinja", arguments={}).source == TEMPLATES["ours_qwen3"]

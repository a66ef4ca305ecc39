"""What no template could make one prompt of is refused before one sees it: role, content, order, tools."""

from __future__ import annotations

import pytest

from miles.config import ConfigError
from miles.data.chat import Conversation
from miles.data.chat.conversation import MOST_MESSAGES

USER = {"role": "user", "content": "1+2?"}
ANSWER = {"role": "assistant", "content": "3"}
SYSTEM = {"role": "system", "content": "Add."}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "3"}


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [SYSTEM, USER],
        [{**SYSTEM, "role": "developer"}, USER],
        [SYSTEM, USER, ANSWER, USER],
        [USER, CALL, RESULT],
        [USER, CALL, RESULT, RESULT, ANSWER, USER],
        [USER, CALL, {"role": "tool", "content": ""}],
        [USER, {**CALL, "content": ""}, RESULT],
        [USER, CALL, RESULT, CALL, RESULT],
    ],
)
def test_conversations_that_someone_is_to_answer_are_taken(messages):
    assert Conversation.of(messages, place="p:1").messages == tuple(messages)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "p:1: 'messages' is missing; write a list of messages"),
        ("1+2", "'messages' is \"1+2\"; write a list of messages"),
        ([], "'messages' is an empty list"),
        (["1+2"], "messages[0] is \"1+2\", not an object; write {'role': ..., 'content': ...}"),
        ([{"role": "human", "content": "x"}], 'messages[0].role is "human"; use one of system, developer, user, assi'),
        ([{"content": "x"}], "messages[0].role is missing; use one of system"),
        ([{"role": ["user"], "content": "x"}], 'messages[0].role is ["user"]; use one of system'),
        ([{"role": "user", "content": " \n"}], "messages[0].content is empty; write its text, or remove the message"),
        ([{"role": "user"}], "messages[0].content is missing, not text; quote it"),
        ([{"role": "user", "content": 3}], "messages[0].content is 3, not text; quote it"),
        ([{"role": "user", "content": [{"type": "text"}]}], "is a list of parts; only text is supported: join"),
        (
            [ANSWER],
            "messages[0]: an assistant message comes first; the order is a system message first if there is one",
        ),
        ([USER, SYSTEM, USER], "messages[1]: a system message follows a user message; the order is"),
        ([SYSTEM, SYSTEM, USER], "messages[1]: a system message follows a system message; the order is"),
        ([USER, USER], "messages[1]: a user message follows a user message; the order is"),
        ([USER, ANSWER, ANSWER, USER], "messages[2]: an assistant message follows an assistant message"),
        ([USER, ANSWER, RESULT], "messages[2]: a tool message follows an assistant message without tool_calls"),
        ([RESULT], "messages[0]: a tool message comes first"),
        (
            [USER, ANSWER],
            "messages ends with an assistant message, so nothing is left to answer; end it with a user or",
        ),
        ([SYSTEM], "messages ends with a system message, so nothing is left to answer"),
        ([USER, {**CALL, "tool_calls": "add"}], "messages[1].tool_calls must be a list of objects in an assistant"),
        ([{**USER, "tool_calls": CALL["tool_calls"]}], "messages[0].tool_calls must be a list of objects in an"),
        ([{**USER, 3: "x"}], "messages[0] has a key that is no text"),
        ([{"role": "user", "content": "\ud800"}], "messages[0] holds \\ud800, half of a surrogate pair"),
        ([USER, {**CALL, "name": "\udfff"}, RESULT], "messages[1] holds \\udfff, half of a surrogate pair"),
        ([USER, ANSWER] * (MOST_MESSAGES // 2) + [USER], f"has {MOST_MESSAGES + 1} messages, at most {MOST_MESSAGES}"),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_line_with_its_place(messages, said):
    with pytest.raises(ConfigError) as raised:
        Conversation.of(messages, place="p:1")
    text = str(raised.value)
    assert said in text
    assert text.startswith("p:1: ")
    assert "; " in text or ": " in text
    assert "\n" not in text


@pytest.mark.parametrize("tools", ["add", {"name": "add"}, ["add"], [{"name": "add"}, None]])
def test_tools_are_a_list_of_objects(tools):
    with pytest.raises(ConfigError, match=r"p:1: tools is .*; write a list of JSON schemas, one object a tool"):
        Conversation.of([USER], tools, place="p:1")


def test_no_tools_are_no_tools():
    assert Conversation.of([USER], [], place="p").tools is None
    assert Conversation.of([USER], None, place="p").tools is None


def test_a_system_prompt_stands_first_and_never_beside_another():
    made = Conversation.of([USER], place="p:1").with_system("Be brief.", place="p:1")
    assert made.messages == ({"role": "system", "content": "Be brief."}, USER)
    for opening in (SYSTEM, {**SYSTEM, "role": "developer"}):
        with pytest.raises(ConfigError, match=r"of its own and data.system_prompt is set too; remove one of them"):
            Conversation.of([opening, USER], place="p:1").with_system("Be brief.", place="p:1")


def test_the_key_tells_conversations_apart_by_messages_and_tools():
    one = Conversation.of([USER], place="p")
    assert one.key() == Conversation.of([dict(reversed(USER.items()))], place="q").key()
    others = [
        Conversation.of([SYSTEM, USER], place="p"),
        Conversation.of([USER], [{"name": "add"}], place="p"),
        Conversation.of([{"role": "user", "content": "1+3?"}], place="p"),
    ]
    assert len({one.key(), *(other.key() for other in others)}) == 4


def test_texts_are_all_that_a_template_may_write():
    made = Conversation.of([USER, {**CALL, "content": "Hm."}, RESULT], [{"name": "t", "list": ["a"]}], place="p")
    assert list(made.texts()) == [
        "1+2?", "function", "name", "add", "arguments", "Hm.", "3", "name", "t", "list", "a"
    ]  # fmt: skip

"""A conversation that a model is to continue: roles, order and contents are checked before any template sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from miles.config import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
_OPENING = ("system", "developer")
# What may stand before a message of a role; None: nothing stands before it.
_BEFORE: dict[str, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None,),
    "user": (None, "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_ORDER = "a system message first if there is one, then user and assistant in turn; tool messages follow a tool call"
MOST_MESSAGES = 4096


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages`: objects with role and content, the last of a user or a tool, or of an assistant where it is `answered`.

    `tools`: JSON schemas, or None. Make one with `of`, which checks them.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None

    @classmethod
    def of(
        cls, messages: Any, tools: Any = None, *, place: str, key: str = "messages", answered: bool = False
    ) -> Conversation:
        """`ConfigError` that begins with `place` when a template could not make one prompt of them.

        `answered`: the last message is an assistant's, to be learned from; else it waits for one.
        """
        if not isinstance(messages, list | tuple) or not messages:
            got = "an empty list" if isinstance(messages, list | tuple) else f"{_shown(messages)}"
            raise ConfigError(f"{place}: {key!r} is {got}; write a list of messages, each with role and content")
        if len(messages) > MOST_MESSAGES:
            raise ConfigError(f"{place}: {key!r} has {len(messages)} messages, at most {MOST_MESSAGES}; split the row")
        before: str | None = None
        called = False
        kept = []
        for number, message in enumerate(messages):
            where = f"{place}: {key}[{number}]"
            before, called = _check_message(message, before, called, where)
            # A key without a value is a key left out; several templates print it otherwise.
            kept.append({name: value for name, value in message.items() if value is not None})
        if answered and before != "assistant":
            raise ConfigError(
                f"{place}: {key} ends with {_named(before)}, so its last answer is missing; end it with an assistant message"
            )
        if not answered and before not in ("user", "tool"):
            raise ConfigError(
                f"{place}: {key} ends with {_named(before)}, so nothing is left to answer; end it with a user or tool "
                "message"
            )
        return cls(tuple(kept), _checked_tools(tools, place))

    def with_system(self, text: str, *, place: str) -> Conversation:
        """The conversation after a system message; `ConfigError` when it has its own."""
        first = self.messages[0]["role"]
        if first in _OPENING:
            raise ConfigError(
                f"{place}: the row has {_named(first)} of its own and data.system_prompt is set too; remove one of them"
            )
        return Conversation(({"role": "system", "content": text}, *self.messages), self.tools)

    def without_answer(self) -> Conversation:
        """An answered conversation as the prompt that its last message answers."""
        return Conversation(self.messages[:-1], self.tools)

    def key(self) -> str:
        """What tells this conversation from others: canonical JSON of messages and tools; of a question alone its text."""
        if self.tools is None and len(self.messages) == 1 and self.messages[0].keys() == {"role", "content"}:
            return self.messages[0]["content"]
        return json.dumps([self.messages, self.tools], sort_keys=True, ensure_ascii=False)

    def texts(self) -> Iterator[str]:
        """Every text in messages and tools but the roles, in order."""
        for message in self.messages:
            for name, value in message.items():
                if name != "role":
                    yield from _texts(value)
        yield from _texts(self.tools)


def _check_message(message: Any, before: str | None, called: bool, where: str) -> tuple[str, bool]:
    """(role, whether it called a tool)."""
    if not isinstance(message, dict):
        raise ConfigError(f"{where} is {_shown(message)}, not an object; write {{'role': ..., 'content': ...}}")
    if not all(isinstance(name, str) for name in message):
        raise ConfigError(f"{where} has a key that is no text; write role, content and their like")
    role = message.get("role")
    if role not in ROLES:
        raise ConfigError(f"{where}.role is {_shown(role)}; use one of {', '.join(ROLES)}")
    if before not in _BEFORE[role] or (role == "tool" and before == "assistant" and not called):
        after = "comes first" if before is None else f"follows {_named(before)}"
        if role == "tool" and before == "assistant":
            after += " without tool_calls"
        raise ConfigError(f"{where}: {_named(role)} {after}; the order is {_ORDER}")
    calls = message.get("tool_calls")
    if calls is not None and (role != "assistant" or not _objects(calls)):
        raise ConfigError(f"{where}.tool_calls must be a list of objects in an assistant message; correct or remove it")
    for text in _texts(message):
        check_characters(text, where)
    content = message.get("content")
    if content is None and calls:
        return role, True
    if isinstance(content, list):
        raise ConfigError(
            f"{where}.content is a list of parts; only text is supported: join the text parts to one text"
        )
    if not isinstance(content, str):
        raise ConfigError(f"{where}.content is {_shown(content)}, not text; quote it")
    # What a tool printed may be nothing.
    if not content.strip() and role != "tool" and not calls:
        raise ConfigError(f"{where}.content is empty; write its text, or remove the message")
    return role, bool(calls)


def _checked_tools(tools: Any, place: str) -> tuple[dict[str, Any], ...] | None:
    if tools is None or tools == [] or tools == ():
        return None
    if not _objects(tools):
        raise ConfigError(f"{place}: tools is {_shown(tools)}; write a list of JSON schemas, one object a tool")
    for text in _texts(tools):
        check_characters(text, f"{place}: tools")
    return tuple(tools)


def check_characters(text: str, place: str) -> None:
    """`ConfigError` for half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    half = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
    if half is not None:
        raise ConfigError(
            f"{place} holds \\u{ord(half):04x}, half of a surrogate pair and no character; write the character itself "
            "or both halves"
        )


def _objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, dict) for item in value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, child in value.items():
            yield from _texts(name)
            yield from _texts(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _texts(child)


def _named(role: str | None) -> str:
    return f"{'an' if role == 'assistant' else 'a'} {role} message"


def _shown(value: Any) -> str:
    return "missing" if value is None else json.dumps(value, default=repr, ensure_ascii=False)[:60]

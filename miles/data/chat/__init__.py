"""Conversations as prompts: checked messages, a chat template, and the process that renders one with the other."""

from __future__ import annotations

from miles.data.chat.conversation import Conversation, check_characters
from miles.data.chat.renderer import ChatRenderer
from miles.data.chat.template import ChatFormat, ChatTemplate, read_template

__all__ = [
    "ChatFormat",
    "ChatRenderer",
    "ChatTemplate",
    "Conversation",
    "check_characters",
    "conversation",
    "read_template",
]

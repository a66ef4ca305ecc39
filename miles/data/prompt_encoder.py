"""From a task's item to token ids, once: plain text by the tokenizer, conversations by the chat template before it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from miles.config import ConfigError
from miles.data.chat import ChatRenderer, Conversation, read_template
from miles.data.config import OWN_TEMPLATE, DataConfig
from miles.data.tasks import TaskItem


class Encoder(Protocol):
    def encode(self, text: str) -> np.ndarray: ...


class ChatEncoder(Encoder, Protocol):
    """What conversations need of `miles.data.tokenizer.Tokenizer`."""

    def encode_marked(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]: ...

    @property
    def directory(self) -> Path: ...

    def special_in(self, text: str) -> str | None: ...


def wraps_text(config: DataConfig) -> bool:
    """Whether a prompt that is text becomes a conversation."""
    return config.system_prompt is not None or config.chat_template is not None


class PromptEncoder:
    """`encode` items; `close` when done with them. The template is read, and its process started, when one is needed."""

    def __init__(self, config: DataConfig, tokenizer: Encoder) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._wraps_text = wraps_text(config)
        self._renderer: ChatRenderer | None = None
        self._chat: ChatEncoder | None = None

    def encode(self, item: TaskItem, *, place: str) -> tuple[str, np.ndarray]:
        """(text, int64 [P]) of the whole prompt. Errors begin with `place`."""
        conversation = item.conversation
        if conversation is None and self._wraps_text:
            conversation = Conversation.of([{"role": "user", "content": item.text}], place=place)
        text = item.text if conversation is None else self._rendered(conversation, place)
        try:
            return text, self._tokenizer.encode(text)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None

    def encode_answered(self, conversation: Conversation, *, place: str) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [n], mask bool [n]) of an answered conversation; the mask holds tokens that its assistants wrote.

        The end of a turn belongs to the answer where the template writes it in one. Errors begin with `place`.
        """
        conversation = self._prepared(conversation, place)
        assert self._renderer is not None
        assert self._chat is not None
        text, answers = self._renderer.render_answered(conversation, place=place)
        try:
            return self._chat.encode_marked(text, answers)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _rendered(self, conversation: Conversation, place: str) -> str:
        conversation = self._prepared(conversation, place)
        assert self._renderer is not None
        return self._renderer.render(conversation, place=place)

    def _prepared(self, conversation: Conversation, place: str) -> Conversation:
        """With the system prompt and without special tokens; the renderer is there."""
        if self._config.system_prompt is not None:
            conversation = conversation.with_system(self._config.system_prompt, place=place)
        if self._renderer is None:
            self._open()
        self._refuse_special_tokens(list(conversation.texts()), place)
        return conversation

    def _open(self) -> None:
        tokenizer, config = self._tokenizer, self._config
        if not hasattr(tokenizer, "directory"):
            raise ConfigError("data: conversations need the files of a tokenizer; set model.path")
        chat: ChatEncoder = tokenizer  # type: ignore[assignment]
        file = None if config.chat_template in (None, OWN_TEMPLATE) else Path(str(config.chat_template))
        template = read_template(chat.directory, file=file, arguments=config.chat_template_kwargs)
        self._chat = chat
        self._renderer = ChatRenderer(template)

    def _refuse_special_tokens(self, texts: Sequence[str], place: str) -> None:
        """Such a token in a content would end or begin a turn that nobody took."""
        assert self._chat is not None
        # Also where two contents that a template writes side by side make one together.
        for text in (*texts, "".join(texts)):
            found = self._chat.special_in(text)
            if found is not None:
                raise ConfigError(
                    f"{place}: the text holds {found!r}, a special token of the tokenizer, which would act as one; write "
                    "it otherwise, or remove the row"
                )

"""From an example to token ids and a mask: the assistant's words are learnt, everything else is read.

Each answer follows the very ids that a rollout's prompt would have, and ends with the token that ends answers: what
the template writes behind it is read. The text between two answers is encoded by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from miles.config import ConfigError
from miles.data.chat import Conversation
from miles.data.config import DataConfig
from miles.data.prompt_encoder import ChatText, Encoder
from miles.data.supervised.rows import Example


class AnswerEncoder(Encoder, Protocol):
    """What examples need of `miles.data.tokenizer.Tokenizer`."""

    eos_id: int

    def text_of(self, index: int) -> str | None: ...


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """`tokens` int64 [T]; `loss_mask` uint8 [T - prompt_length], 1 at what is learnt. The prompt ends before the first
    answer that is learnt."""

    tokens: np.ndarray
    prompt_length: int
    loss_mask: np.ndarray


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    learnt: bool


class ExampleEncoder:
    """`encode` examples; `close` when done with them. `end_ids`: tokens that end an answer, beside the tokenizer's own."""

    def __init__(self, config: DataConfig, tokenizer: AnswerEncoder, end_ids: Iterable[int] = ()) -> None:
        self._answers: Literal["all", "last"] = config.supervised.answers
        self._tokenizer = tokenizer
        self._chat = ChatText(config, tokenizer)
        ends = (tokenizer.text_of(index) for index in dict.fromkeys((tokenizer.eos_id, *end_ids)))
        self._ends = tuple(text for text in ends if text is not None)

    def encode(self, example: Example) -> EncodedExample:
        """`ConfigError` begins with the example's place."""
        if example.conversation is None:
            return self._joined(self._plain(example), example.place)
        pieces = self._pieces(self._chat.checked(example.conversation, place=example.place), example.place)
        return self._joined([(self._ids(piece.text, example.place), piece.learnt) for piece in pieces], example.place)

    def close(self) -> None:
        self._chat.close()

    def _plain(self, example: Example) -> list[tuple[np.ndarray, bool]]:
        end = np.array([self._tokenizer.eos_id], dtype=np.int64)
        answer = np.concatenate([self._ids(example.answer, example.place), end])
        return [(self._ids(example.text, example.place), False), (answer, True)]

    def _ids(self, text: str, place: str) -> np.ndarray:
        try:
            return self._tokenizer.encode(text)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None

    def _pieces(self, conversation: Conversation, place: str) -> list[_Piece]:
        """The conversation's text, cut where answers begin and end."""
        places = [k for k, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        learnt = places if self._answers == "all" else places[-1:]
        whole = self._chat.rendered(conversation, place=place, generation_prompt=False)
        pieces: list[_Piece] = []
        at = 0
        for k in learnt:
            prompt = self._chat.rendered(conversation.upto(k), place=place, generation_prompt=True)
            answered = conversation.upto(k + 1)
            last = k + 1 == len(conversation.messages)
            text = whole if last else self._chat.rendered(answered, place=place, generation_prompt=False)
            if not text.startswith(prompt):
                raise ConfigError(
                    f"{place}: the chat template does not begin messages[{k}] as it asks for an answer, so no prompt leads to "
                    "it; write the message as the model would (its thinking included), or give another data.chat_template"
                )
            end = self._end(text, len(prompt), place, k)
            if not whole.startswith(text[:end]):
                raise ConfigError(
                    f"{place}: the chat template writes messages[{k}] otherwise once the conversation goes on, so it cannot be "
                    "learnt beside later ones; set data.supervised.answers to last"
                )
            pieces += [_Piece(whole[at : len(prompt)], False), _Piece(whole[len(prompt) : end], True)]
            at = end
        # Nothing is learnt from what follows the last answer.
        return pieces

    def _end(self, text: str, begin: int, place: str, k: int) -> int:
        """Where the answer that begins at `begin` ends: behind the last token that ends answers."""
        ends = [found + len(end) for end in self._ends if (found := text.rfind(end, begin)) >= 0]
        if not ends:
            raise ConfigError(
                f"{place}: the chat template writes none of {', '.join(map(repr, self._ends))} behind messages[{k}], so the "
                "model would not learn to end an answer; give a data.chat_template that does"
            )
        return max(ends)

    def _joined(self, pieces: list[tuple[np.ndarray, bool]], place: str) -> EncodedExample:
        tokens = np.concatenate([ids for ids, _ in pieces])
        mask = np.concatenate([np.full(len(ids), learnt, dtype=np.uint8) for ids, learnt in pieces])
        prompt = len(pieces[0][0])
        if not prompt:
            raise ConfigError(
                f"{place}: nothing comes before the first answer; give a data.chat_template that writes roles"
            )
        return EncodedExample(tokens, prompt, mask[prompt:])

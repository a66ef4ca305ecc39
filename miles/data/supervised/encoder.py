"""From an example to token ids and a mask: the assistant's words are learnt, everything else is read.

An answer ends with the token that ends answers; what the template writes behind it is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from miles.config import ConfigError
from miles.data.config import DataConfig
from miles.data.prompt_encoder import Encoder, PromptEncoder
from miles.data.supervised.rows import Example


class AnswerEncoder(Encoder, Protocol):
    """What examples need of `miles.data.tokenizer.Tokenizer`."""

    eos_id: int


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """`tokens` int64 [T]; `loss_mask` uint8 [T - prompt_length], 1 at what is learnt. The prompt ends before the first
    answer that is learnt."""

    tokens: np.ndarray
    prompt_length: int
    loss_mask: np.ndarray


class ExampleEncoder:
    """`encode` examples; `close` when done with them. `end_ids`: tokens that end an answer, beside the tokenizer's own."""

    def __init__(self, config: DataConfig, tokenizer: AnswerEncoder, end_ids: Iterable[int] = ()) -> None:
        self._last_only = config.supervised.answers == "last"
        self._tokenizer = tokenizer
        self._prompts = PromptEncoder(config, tokenizer)
        self._ends = np.array(sorted({tokenizer.eos_id, *end_ids}), dtype=np.int64)

    def encode(self, example: Example) -> EncodedExample:
        """`ConfigError` begins with the example's place."""
        if example.conversation is None:
            ids, mask = self._plain(example)
        else:
            ids, mask = self._prompts.encode_answered(example.conversation, place=example.place)
            mask = self._learnt(ids, mask, example.place)
        prompt = int(np.argmax(mask))
        if not prompt:
            raise ConfigError(
                f"{example.place}: nothing comes before the first answer; give a data.chat_template that writes the roles"
            )
        end = len(mask) - int(np.argmax(mask[::-1]))
        # Nothing is learnt from what follows the last answer.
        return EncodedExample(ids[:end], prompt, mask[prompt:end].astype(np.uint8))

    def close(self) -> None:
        self._prompts.close()

    def _plain(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
        try:
            prompt, answer = (self._tokenizer.encode(text) for text in (example.text, example.answer))
        except ConfigError as error:
            raise ConfigError(f"{example.place}: {error}") from None
        ids = np.concatenate([prompt, answer, np.array([self._tokenizer.eos_id], dtype=np.int64)])
        return ids, np.arange(len(ids)) >= len(prompt)

    def _learnt(self, ids: np.ndarray, written: np.ndarray, place: str) -> np.ndarray:
        """bool [n]: of what assistants wrote, each answer up to its end token; the last alone where that is asked for."""
        edges = np.flatnonzero(np.diff(written.astype(np.int8), prepend=0, append=0))
        answers = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        learnt = np.zeros(len(ids), dtype=bool)
        for start, end in answers[-1:] if self._last_only else answers:
            ends = np.flatnonzero(np.isin(ids[start:end], self._ends))
            if not len(ends):
                raise ConfigError(
                    f"{place}: the chat template writes no end token (ids {', '.join(map(str, self._ends))}) within an "
                    "answer, so the model would not learn to end one; give a data.chat_template that does, inside its "
                    "generation block where it has one"
                )
            learnt[start : start + int(ends[-1]) + 1] = True
        return learnt

"""`ExampleSource`: the run's stream of examples, resumable by a JSON cursor.

All of them are encoded when it is made, so that what is wrong with one is known before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from miles.config import ConfigError
from miles.data.config import DataConfig
from miles.data.held_out import held_out_keys
from miles.data.prompts import TooLong
from miles.data.sample import Sample, Status
from miles.data.supervised.encoder import AnswerEncoder, EncodedExample, ExampleEncoder
from miles.data.supervised.rows import Example, read_examples

_SCHEMA = 1


class ExampleSource:
    """Examples in an order that depends on (config, seed) alone, each once an epoch.

    `state()` after k examples, given to `restore()` of a new source, continues with example k + 1. `end_ids`: tokens that
    end an answer, beside the tokenizer's own.
    """

    def __init__(self, config: DataConfig, tokenizer: AnswerEncoder, seed: int, *, end_ids: Iterable[int] = ()) -> None:
        self.config = config
        self.too_long = TooLong()
        self._seed, self._next = seed, 0
        encoder = ExampleEncoder(config, tokenizer, end_ids)
        try:
            rows = self._encoded(read_examples(config), encoder)
            if config.held_out_path is not None:
                chosen = self._encoded(read_examples(config, held_out=True), encoder)
                trained = {example.key for example, _ in rows}
                self._also_held_out = len({example.key for example, _ in chosen} & trained)
                self.training, self.held_out = [e for _, e in rows], [e for _, e in chosen]
            else:
                keys = held_out_keys((example.key for example, _ in rows), config.held_out_fraction)
                self._also_held_out = 0
                self.training = [encoded for example, encoded in rows if example.key not in keys]
                self.held_out = [encoded for example, encoded in rows if example.key in keys]
        finally:
            encoder.close()
        if not self.training:
            raise ConfigError(
                f"data.{config.task}.path: every example is held out or left out; add rows, or change "
                "data.held_out_fraction or data.supervised.max_tokens"
            )
        shuffle = config.rows is None or config.rows.shuffle
        self._shuffle = shuffle
        self._epoch, self._order = -1, np.arange(len(self.training))

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(len(example.tokens) for example in (*self.training, *self.held_out))

    @property
    def epoch(self) -> float:
        """How often the examples were gone through."""
        return self._next / len(self.training)

    def next_samples(self, count: int) -> list[Sample]:
        """The next `count` examples as samples; ids are places in the stream, so that they are unique in a run."""
        first, self._next = self._next, self._next + count
        return [sample_of(self._at(index), index) for index in range(first, self._next)]

    def notes(self) -> list[str]:
        """What was done to examples that a user should know of, a line each."""
        found = []
        if self.too_long.count:
            more = ", ..." if self.too_long.count > len(self.too_long.listed) else ""
            found.append(
                f"data.too_long=drop: {self.too_long.count} examples have more than data.supervised.max_tokens="
                f"{self.config.supervised.max_tokens} tokens and are left out: {', '.join(self.too_long.listed)}{more}; raise "
                "data.supervised.max_tokens to keep them"
            )
        if self._also_held_out:
            found.append(
                f"data.held_out_path: {self._also_held_out} of its prompts are trained on too; take them out of one of the "
                "two files"
            )
        return found

    def state(self) -> dict[str, Any]:
        return {"schema": _SCHEMA, "seed": self._seed, "next_index": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        """`ConfigError` when the cursor belongs to another seed or schema."""
        for key, mine in (("schema", _SCHEMA), ("seed", self._seed)):
            if state.get(key) != mine:
                raise ConfigError(
                    f"data cursor: {key} is {state.get(key)!r} in the checkpoint and {mine!r} in this run; resume with the "
                    "recipe that wrote it, or start a new run"
                )
        self._next = int(state["next_index"])

    def _at(self, index: int) -> EncodedExample:
        epoch, position = divmod(index, len(self.training))
        if self._shuffle and epoch != self._epoch:
            rng = np.random.Generator(np.random.Philox(key=self._seed, counter=epoch << 64))
            self._epoch, self._order = epoch, rng.permutation(len(self.training))
        return self.training[int(self._order[position])]

    def _encoded(self, examples: list[Example], encoder: ExampleEncoder) -> list[tuple[Example, EncodedExample]]:
        found = []
        limit = self.config.supervised.max_tokens
        for example in examples:
            encoded = encoder.encode(example)
            if len(encoded.tokens) <= limit:
                found.append((example, encoded))
            elif self.config.too_long == "drop":
                self.too_long.add(example.place, len(encoded.tokens))
            else:
                raise ConfigError(
                    f"{example.place}: the example has {len(encoded.tokens)} tokens, above data.supervised.max_tokens={limit}; "
                    "raise it, shorten the example, or set data.too_long to drop"
                )
        return found


def sample_of(example: EncodedExample, index: int) -> Sample:
    """A finished sample, a group and rollout of its own; without reward, log-probs or weight version."""
    return Sample(
        f"example-{index}",
        index,
        index,
        tokens=example.tokens,
        prompt_length=example.prompt_length,
        loss_mask=example.loss_mask,
        status=Status.COMPLETED,
    )

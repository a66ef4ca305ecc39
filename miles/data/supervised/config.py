"""Configuration of examples with given answers (`data.supervised.*` of a recipe)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles.config import StrictModel


class SupervisedConfig(StrictModel):
    """What a loss without advantages (`algo.loss: sft`) takes of the rows that `data` names."""

    # Examples of one training step.
    batch_examples: int = Field(default=64, ge=1)
    # Tokens of one example, prompt and answers; `data.too_long` says what becomes of a longer one.
    max_tokens: int = Field(default=4096, ge=2)
    # Which assistant messages of a conversation are learnt; the others are read as the prompt is.
    answers: Literal["all", "last"] = "all"

"""Configuration of prompts, packing and the data-parallel schedule (`data.*` of a recipe)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from miles.config import StrictModel


class CopyDigitsConfig(StrictModel):
    """`352=` is answered by `352`."""

    digits: int = Field(default=3, ge=1, le=64)


class ReasoningGymConfig(StrictModel):
    """One of reasoning-gym's procedural tasks, scored by its own scorer."""

    dataset: str = "spell_backward"
    params: dict[str, Any] = Field(default_factory=dict)
    # Format string over `question` and the entry's metadata, e.g. "{word}=".
    template: str = "{question}\n"


class JsonlConfig(StrictModel):
    """A file with one JSON object a line; other keys of a line become the prompt's metadata."""

    path: Path
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    shuffle: bool = True


class DataConfig(StrictModel):
    task: Literal["copy_digits", "reasoning_gym", "jsonl"] = "copy_digits"
    copy_digits: CopyDigitsConfig = CopyDigitsConfig()
    reasoning_gym: ReasoningGymConfig = ReasoningGymConfig()
    jsonl: JsonlConfig | None = None
    # Share of prompts that training never sees; 0 trains on all (then `held_out` is refused).
    held_out_fraction: float = Field(default=0.1, ge=0.0, lt=1.0)
    max_prompt_tokens: int = Field(default=1024, ge=1)
    # Tokens of one micro-batch on one context-parallel rank, with what pads it there.
    max_tokens_per_gpu: int = Field(default=8192, ge=1)
    balance: Literal["none", "tokens", "flops"] = "tokens"
    # Rollouts of one optimizer step; null: all of a training step. Fewer make several steps on one rollout.
    global_batch_size: int | None = Field(default=None, ge=1)
    # What becomes of rollouts that do not fill the last optimizer step.
    partial_step: Literal["drop", "train"] = "drop"
    layout: Literal["bshd", "thd"] = "thd"

    @model_validator(mode="after")
    def _task_has_its_options(self) -> DataConfig:
        if self.task == "jsonl" and self.jsonl is None:
            raise ValueError("data.task is jsonl but data.jsonl.path is not set; name the file of prompts")
        if self.partial_step == "train" and self.global_batch_size is None:
            raise ValueError(
                "data.partial_step has no effect while data.global_batch_size is null: every rollout is trained; set "
                "global_batch_size, or remove it"
            )
        for name in ("copy_digits", "reasoning_gym", "jsonl"):
            if self.task != name and getattr(self, name) != DataConfig.model_fields[name].get_default():
                raise ValueError(f"data.{name} has no effect with data.task {self.task}; set data.task to {name}")
        return self

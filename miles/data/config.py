"""Configuration of prompts, packing and the data-parallel schedule (`data.*` of a recipe)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from miles.config import StrictModel, user_code
from miles.config.beside_recipe import BesideRecipe, RecipePath
from miles.data.supervised.config import SupervisedConfig


class CopyDigitsConfig(StrictModel):
    """`352=` is answered by `352`."""

    digits: int = Field(default=3, ge=1, le=64)


class ReasoningGymConfig(StrictModel):
    """One of reasoning-gym's procedural tasks, scored by its own scorer."""

    dataset: str = "spell_backward"
    params: dict[str, Any] = Field(default_factory=dict)
    # Format string over `question` and the entry's metadata, e.g. "{word}=".
    template: str = "{question}\n"


class RowsConfig(StrictModel):
    """Rows of a file. A prompt is the text under `prompt_key`, or the conversation under `messages_key`."""

    path: RecipePath
    # null: "prompt", unless messages_key is set
    prompt_key: str | None = None
    # A list of messages: role, content, tool_calls, ...
    messages_key: str | None = None
    # JSON schemas of the tools that a conversation may call: a list, or a list as JSON text.
    tools_key: str | None = None
    # Any JSON value, handed to the reward; null: rows have no answer.
    answer_key: str | None = "answer"
    # Keys handed to the reward beside the answer; null: all that have no other use.
    metadata_keys: list[str] | None = None
    shuffle: bool = True

    @model_validator(mode="after")
    def _one_kind_of_prompt(self) -> RowsConfig:
        if self.messages_key is not None and self.prompt_key is not None:
            raise ValueError("prompt_key and messages_key are both set, but a row has one prompt; remove one of them")
        if self.tools_key is not None and self.messages_key is None:
            raise ValueError("tools_key has no effect without messages_key; set messages_key, or remove it")
        return self


class JsonlConfig(RowsConfig):
    """One JSON object a line."""


class ParquetConfig(RowsConfig):
    """A Parquet file, or a folder of them in the order of their names."""


class DatasetConfig(RowsConfig):
    """A folder that Hugging Face `datasets` wrote by `save_to_disk`. `split`: which one, where it has several."""

    split: str | None = None


class PythonTaskConfig(StrictModel):
    """A class of your own: `path/to/file.py:Class` or `package.module:Class`, made with (options, seed)."""

    path: Annotated[str, AfterValidator(user_code.full_reference)]
    options: dict[str, Any] = Field(default_factory=dict)


# Tasks that read rows of a file.
ROW_TASKS = ("jsonl", "parquet", "dataset")
OWN_TEMPLATE = "tokenizer"
DEFAULT_HELD_OUT = 0.1


class DataConfig(StrictModel):
    task: Literal["copy_digits", "reasoning_gym", "jsonl", "parquet", "dataset", "python"] = "copy_digits"
    copy_digits: CopyDigitsConfig = CopyDigitsConfig()
    reasoning_gym: ReasoningGymConfig = ReasoningGymConfig()
    jsonl: JsonlConfig | None = None
    parquet: ParquetConfig | None = None
    dataset: DatasetConfig | None = None
    python: PythonTaskConfig | None = None
    # Set, it stands before each conversation, and a prompt that is text becomes one.
    system_prompt: str | None = Field(default=None, min_length=1)
    # `tokenizer`: the tokenizer's own, for prompts that are text too; else a Jinja file. null: own, for messages alone.
    chat_template: Annotated[str | None, BesideRecipe(words=(OWN_TEMPLATE,))] = None
    # Names that the template knows beside messages and tools, e.g. {enable_thinking: false}.
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    # Share of prompts that training never sees; 0 trains on all (then `held_out` is refused).
    held_out_fraction: float = Field(default=DEFAULT_HELD_OUT, ge=0.0, lt=1.0)
    # Held-out prompts of a file of their own, of the same form as the task's; then training sees all of the task's.
    held_out_path: RecipePath | None = None
    max_prompt_tokens: int = Field(default=1024, ge=1)
    # What becomes of a longer prompt: an error, left out, or cut at its beginning.
    too_long: Literal["error", "drop", "truncate_left"] = "error"
    # Tokens of one micro-batch on one context-parallel rank, with what pads it there.
    max_tokens_per_gpu: int = Field(default=8192, ge=1)
    balance: Literal["none", "tokens", "flops"] = "tokens"
    # Examples with given answers, for a loss without advantages.
    supervised: SupervisedConfig = SupervisedConfig()
    # Rollouts of one optimizer step; null: all of a training step. Fewer make several steps on one rollout.
    global_batch_size: int | None = Field(default=None, ge=1)
    # What becomes of rollouts that do not fill the last optimizer step.
    partial_step: Literal["drop", "train"] = "drop"
    layout: Literal["bshd", "thd"] = "thd"

    @property
    def rows(self) -> RowsConfig | None:
        """The section of the task, when it reads rows."""
        sections: dict[str, RowsConfig | None] = {"jsonl": self.jsonl, "parquet": self.parquet, "dataset": self.dataset}
        return sections.get(self.task)

    @property
    def has_held_out(self) -> bool:
        return self.held_out_path is not None or self.held_out_fraction > 0.0

    @model_validator(mode="after")
    def _task_has_its_options(self) -> DataConfig:
        if self.task in (*ROW_TASKS, "python") and getattr(self, self.task) is None:
            what = "a class of your own" if self.task == "python" else "the file of prompts"
            raise ValueError(f"data.task is {self.task} but data.{self.task}.path is not set; name {what}")
        if self.partial_step == "train" and self.global_batch_size is None:
            raise ValueError(
                "data.partial_step has no effect while data.global_batch_size is null: every rollout is trained; set "
                "global_batch_size, or remove it"
            )
        for name in ("copy_digits", "reasoning_gym", *ROW_TASKS, "python"):
            if self.task != name and getattr(self, name) != DataConfig.model_fields[name].get_default():
                raise ValueError(f"data.{name} has no effect with data.task {self.task}; set data.task to {name}")
        if self.held_out_path is not None and self.rows is None:
            raise ValueError(
                f"data.held_out_path has no effect with data.task {self.task}; it needs one of {', '.join(ROW_TASKS)}"
            )
        if self.held_out_path is not None and self.held_out_fraction != DEFAULT_HELD_OUT:
            raise ValueError(
                "data.held_out_fraction has no effect with data.held_out_path: the file is what is held out; remove one"
            )
        return self

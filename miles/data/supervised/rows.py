"""Rows of the data as examples: a conversation that ends with its answer, or a prompt and an answer that are text."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config import ConfigError
from miles.data.chat.conversation import Conversation
from miles.data.config import ROW_TASKS, DataConfig
from miles.data.prompt_encoder import wraps_text
from miles.data.tasks.row_file import text_in, tools_in
from miles.data.tasks.row_sources import open_rows


@dataclass(frozen=True, slots=True)
class Example:
    """`conversation` ends with an assistant message; without one there are `text` and `answer`. `place`: its row."""

    text: str
    answer: str
    conversation: Conversation | None
    place: str

    @property
    def key(self) -> str:
        """The key that the same prompt has as a task's item, so that both are held out together."""
        return self.text if self.conversation is None else self.conversation.without_answer().key()


def read_examples(config: DataConfig, *, held_out: bool = False) -> list[Example]:
    """Every row in the file's order. `ConfigError` names the row of the first that is no example, or the option.

    `held_out`: those of `data.held_out_path`, where there is one.
    """
    rows = config.rows
    if rows is None:
        raise ConfigError(
            f"data.task is {config.task}, which asks and gives no answers to learn; set it to one of "
            f"{', '.join(ROW_TASKS)}, with messages that end with the assistant's or with prompts and answers that are text"
        )
    option = f"data.{config.task}.path"
    if held_out:
        assert config.held_out_path is not None
        option, rows = "data.held_out_path", rows.model_copy(update={"path": config.held_out_path})
    found = []
    for place, row in open_rows(config.task, rows, option):
        if rows.messages_key is not None:
            tools = None if rows.tools_key is None else tools_in(row, rows.tools_key, place)
            conversation = Conversation.of(
                row.get(rows.messages_key), tools, place=place, key=rows.messages_key, answered=True
            )
            found.append(Example("", "", conversation, place))
            continue
        if rows.answer_key is None:
            raise ConfigError(f"data.{config.task}.answer_key is null, but answers are what is learnt; name their key")
        text, answer = (text_in(row, key, place) for key in (rows.prompt_key or "prompt", rows.answer_key))
        if not wraps_text(config):
            found.append(Example(text, answer, None, place))
            continue
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        found.append(Example("", "", Conversation.of(messages, place=place, answered=True), place))
    if not found:
        raise ConfigError(f"{option}: {rows.path} holds no examples; write one row for each")
    return found


def alphabet(config: DataConfig) -> str:
    """Characters of all examples, for a character tokenizer."""
    seen: set[str] = set()
    for held_out in (False, True) if config.held_out_path is not None else (False,):
        for example in read_examples(config, held_out=held_out):
            seen.update(example.text, example.answer)
            if example.conversation is not None:
                seen.update(*example.conversation.texts())
    return "".join(sorted(seen))

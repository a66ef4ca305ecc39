"""The character tokenizer of a model that the run makes: which characters, and which chat format."""

from __future__ import annotations

from miles.data.chat import ChatFormat
from miles.data.prompt_encoder import wraps_text
from miles.data.tasks import build_task
from miles.data.tasks.user_task import PRINTABLE
from miles.recipe.schema import Recipe


def created_tokenizer(recipe: Recipe) -> tuple[str, ChatFormat | None]:
    """(alphabet, the family's chat format where prompts are conversations), for `build_char_tokenizer`."""
    from miles.models import registry

    task = build_task(recipe.data, recipe.seed)
    if not (task.has_conversations or wraps_text(recipe.data)):
        return task.alphabet, None
    # Templates write words of their own.
    alphabet = PRINTABLE + "".join(sorted(set(task.alphabet + (recipe.data.system_prompt or "")) - set(PRINTABLE)))
    return alphabet, registry.chat_format(recipe.model.family)

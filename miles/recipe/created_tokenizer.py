"""The character tokenizer of a model that the run makes: which characters, and which chat format."""

from __future__ import annotations

from miles.data.chat import ChatFormat
from miles.data.prompt_encoder import wraps_text
from miles.data.supervised.rows import alphabet
from miles.data.tasks import build_task
from miles.data.tasks.user_task import PRINTABLE
from miles.recipe.schema import Recipe


def created_tokenizer(recipe: Recipe) -> tuple[str, ChatFormat | None]:
    """(alphabet, the family's chat format where prompts are conversations), for `build_char_tokenizer`."""
    from miles.models import registry

    if recipe.supervised:
        own, conversations = alphabet(recipe.data), recipe.data.rows is not None and bool(recipe.data.rows.messages_key)
    else:
        task = build_task(recipe.data, recipe.seed)
        own, conversations = task.alphabet, task.has_conversations
    if not (conversations or wraps_text(recipe.data)):
        return own, None
    # Templates write words of their own.
    characters = PRINTABLE + "".join(sorted(set(own + (recipe.data.system_prompt or "")) - set(PRINTABLE)))
    return characters, registry.chat_format(recipe.model.family)

"""The files that a recipe names, looked at before anything starts: model folders, tokenizer, prompts.

Reads headers, the tokenizer and the prompts that come first. Left out: what only the device or the engine can say.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from miles.config import ConfigError
from miles.data.end_tokens import read_end_tokens
from miles.data.prompt_encoder import Encoder
from miles.data.prompts import Prompt, PromptSource
from miles.data.supervised.source import ExampleSource
from miles.data.tokenizer import Tokenizer, build_char_tokenizer, char_vocabulary
from miles.evaluate.prompt_sets import read_prompts, seen_in_training
from miles.quant.config import QuantConfig
from miles.recipe.created_tokenizer import created_tokenizer
from miles.recipe.schema import Recipe
from miles.recipe.warm_start import origin
from miles.rollout.rewards import RewardFn

# Prompts of an endless task are alike; of one that ends all are looked at.
LOOKED_AT = 64
# Prompts of training that evaluation sets are compared with; only text is read, so a file is read whole.
COMPARED, COMPARED_IN_FILE = 1024, 1 << 20
# Values are looked at where that takes a moment; the trainer meets those of larger models.
VALUES_UP_TO_BYTES = 256 << 20


class CharacterCount:
    """The token ids that the character tokenizer of a created model would give, without writing one."""

    def __init__(self, alphabet: str) -> None:
        self._ids = {token: index for index, token in enumerate(char_vocabulary(alphabet)) if len(token) == 1}

    def encode(self, text: str) -> np.ndarray:
        lost = sorted(set(text) - self._ids.keys())
        if lost:
            raise ConfigError(
                f"tokenizer: {text[:40]!r} has characters that the task's alphabet lacks: {lost}; use model.path with "
                "a tokenizer that knows them"
            )
        return np.array([self._ids[character] for character in text], dtype=np.int64)


def check_files(recipe: Recipe) -> None:
    """`ConfigError` for a model or teacher folder that is not complete, or a model trained with another rounding."""
    model = origin(recipe).model.path
    for folder in (model, recipe.algo.teacher):
        if folder is not None:
            check_model_files(Path(folder))
    if model is not None:
        check_tokenizer(Path(model))
        check_contract(recipe.quant, Path(model))


def check_model_files(folder: Path) -> None:
    """Every tensor that config.json implies is in the folder, whole and of its shape; small ones are finite."""
    from miles.models import registry
    from miles.models.family import read_hf_config
    from miles.models.hf_files import HFCheckpoint

    hf_config, where = read_hf_config(folder), str(folder / "config.json")
    family = registry.resolve(hf_config, where=where)
    family.to_mcore(hf_config, where=where)
    checkpoint = HFCheckpoint(folder)
    for name, shape, _ in family.shapes(hf_config):
        checkpoint.check(name, shape)
    if checkpoint.nbytes() <= VALUES_UP_TO_BYTES:
        checkpoint.check_finite()


def check_contract(quant: QuantConfig, folder: Path) -> None:
    """`ConfigError` when the folder's quantisation contract asks for another rounding, as at the start of training."""
    from miles.quant.contract import check_rounding
    from miles.quant.headers import read_json, weight_names

    scope = None
    if quant.nvfp4 is not None:
        scope = quant.nvfp4.scope(weight_names(folder), read_json(folder / "config.json"))
    check_rounding(folder, quant.fake_qat_config(), where="model.path", scope=scope)


def check_tokenizer(folder: Path) -> None:
    """`ConfigError` for a missing or damaged tokenizer, or one with more tokens than the model."""
    from miles.models.family import read_hf_config

    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"model.path {folder}: tokenizer.json is missing; give a complete Hugging Face model folder")
    size, rows = Tokenizer(folder).vocab_size, read_hf_config(folder)["vocab_size"]
    if size > rows:
        raise ConfigError(
            f"tokenizer: {folder}/tokenizer.json has {size} tokens, but the model has rows for {rows}; use the tokenizer "
            "that the model was trained with"
        )


@dataclass(frozen=True)
class FirstPrompts:
    """`training`: what it draws first; `evaluation`: all of each set, by name; `overlap`: how many of these training
    sees too, as far as it was looked at. `notes`: what was done to prompts that a user should know of."""

    training: list[Prompt] = field(default_factory=list)
    evaluation: dict[str, list[Prompt]] = field(default_factory=dict)
    overlap: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # Tokens of the longest example with its answers; 0 where answers are not given.
    longest_example: int = 0


def first_prompts(recipe: Recipe) -> FirstPrompts:
    """Drawn by the run's own source, so with its own errors.

    Of a task that ends all are looked at. Empty for a model folder without a tokenizer, which `check_files` refuses.
    """
    start = origin(recipe)
    if start.model.path is None:
        alphabet, chat = created_tokenizer(start)
        if chat is None:
            return _first_prompts(recipe, CharacterCount(alphabet))
        with tempfile.TemporaryDirectory() as folder:
            return _first_prompts(recipe, build_char_tokenizer(alphabet, folder, chat=chat))
    if not (Path(start.model.path) / "tokenizer.json").is_file():
        return FirstPrompts()
    return _first_prompts(recipe, Tokenizer(start.model.path))


def first_examples(recipe: Recipe) -> FirstPrompts:
    """The examples of a recipe whose answers are given, by the run's own source: all of them, for their length and notes."""
    start = origin(recipe)
    if start.model.path is None:
        with tempfile.TemporaryDirectory() as folder:
            alphabet, chat = created_tokenizer(start)
            return _first_examples(recipe, build_char_tokenizer(alphabet, folder, chat=chat), ())
    model = Path(start.model.path)
    if not (model / "tokenizer.json").is_file():
        return FirstPrompts()
    return _first_examples(recipe, Tokenizer(model), read_end_tokens(model).ids)


def _first_examples(recipe: Recipe, tokenizer: Tokenizer, end_ids: Sequence[int]) -> FirstPrompts:
    source = ExampleSource(recipe.data, tokenizer, recipe.seed, end_ids=end_ids)
    return FirstPrompts(notes=source.notes(), longest_example=source.longest)


def _first_prompts(recipe: Recipe, encoder: Encoder) -> FirstPrompts:
    found = FirstPrompts()
    with PromptSource(recipe.data, encoder, recipe.seed) as source:
        source.look_at_all()
        found.training.extend(source.next_groups(source.task.size or LOOKED_AT))
        found.notes.extend(source.notes())
        # Held-out prompts are none of training's whatever they say.
        others = [chosen.name for chosen in recipe.eval.sets if chosen.path is not None or chosen.task is not None]
        trained = source.trained_keys(COMPARED if source.task.size is None else COMPARED_IN_FILE) if others else set()
    for chosen in recipe.eval.sets:
        read, prompts = read_prompts(chosen, recipe.data, encoder, recipe.eval.seed)
        found.evaluation[chosen.name] = prompts
        if chosen.name in others:
            found.overlap[chosen.name] = seen_in_training(prompts, trained)
            found.notes.extend(f"eval.sets {chosen.name}: {note}" for note in read.notes())
    return found


def check_answers(recipe: Recipe, prompts: Iterable[Prompt], reward: RewardFn) -> None:
    """`ConfigError` when the reward compares with an answer that is no text."""
    if not reward.text_answers:
        return
    for prompt in prompts:
        if not isinstance(prompt.answer, str):
            shown = "missing" if prompt.answer is None else f"{json.dumps(prompt.answer)[:40]}, not text"
            raise ConfigError(
                f"rollout.reward.kind {recipe.rollout.reward.kind} compares with the answer's text, but the answer of "
                f"{prompt.key[:40]!r} is {shown}; quote it, or use a reward of your own (kind python)"
            )

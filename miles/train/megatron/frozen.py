"""Models that only score: the policy that the run started from, and a teacher whose answers are distilled.

They are in no checkpoint, because the folders they come from have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.algos.config import AlgoConfig
from miles.config import ConfigError
from miles.config.json_text import parse_json
from miles.models import registry
from miles.models.family import Family, FamilyConfig, read_hf_config
from miles.train.config import TrainConfig
from miles.train.errors import ParallelismError, TrainError
from miles.train.megatron.trained import ScoredModel
from miles.train.parallel_checks import check_parallelism

# What asks for each model, for the error of a caller that did not.
_ASKED_BY = {"reference": "algo.kl.where is reward or loss", "teacher": "algo.opd_coef is above 0"}


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face folder and what its config.json says."""

    folder: Path
    family: Family
    model: FamilyConfig


def frozen_sources(algo: AlgoConfig, policy: ModelSource, train: TrainConfig) -> dict[str, ModelSource]:
    """The models that `algo` needs beside the policy, by name. `ConfigError`: a teacher that cannot score its tokens."""
    found = {"reference": policy} if algo.needs_reference else {}
    if algo.needs_teacher:
        found["teacher"] = _teacher(algo, policy, train)
    return found


def _teacher(algo: AlgoConfig, policy: ModelSource, train: TrainConfig) -> ModelSource:
    if algo.teacher is None:
        raise ConfigError("algo.opd_coef is above 0 but algo.teacher is not set; name the teacher's model folder")
    folder = Path(algo.teacher)
    where = str(folder / "config.json")
    hf_config = read_hf_config(folder)
    family = registry.resolve(hf_config, where=where)
    model = family.to_mcore(hf_config, where=where)
    if model.vocab_size != policy.model.vocab_size:
        raise ConfigError(
            f"{where}: algo.teacher has a vocabulary of {model.vocab_size} tokens, the policy one of "
            f"{policy.model.vocab_size}; distillation compares log-probs of the same token ids: choose a teacher with "
            "the policy's tokenizer"
        )
    theirs, ours = _token_ids(folder), _token_ids(policy.folder)
    if theirs is not None and ours is not None and theirs != ours:
        raise ConfigError(
            f"{folder}/tokenizer.json: algo.teacher numbers its tokens otherwise than {policy.folder}; choose a "
            "teacher with the policy's tokenizer"
        )
    try:
        check_parallelism(train.parallel, model)
    except ParallelismError as error:
        raise ParallelismError(f"algo.teacher {folder}: {error}") from error
    return ModelSource(folder, family, model)


def _token_ids(folder: Path) -> Any:
    """The vocabulary of a fast tokenizer's file, None when the folder has none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return parse_json(path.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no tokenizer with a vocabulary ({error!r}); restore the file") from None


class FrozenModels:
    """Built from `frozen_sources`; weights are undefined until `load`."""

    def __init__(self, sources: dict[str, ModelSource], train: TrainConfig, *shared: Any) -> None:
        self._sources = sources
        self._models = {
            name: ScoredModel(source.family, source.model, train, *shared) for name, source in sources.items()
        }

    def load(self) -> None:
        """Weights of each from its folder; collective."""
        for name, model in self._models.items():
            model.load_hf(self._sources[name].folder)

    def __getitem__(self, name: str) -> ScoredModel:
        if name not in self._models:
            raise TrainError(f"there is no {name} model: it is kept only when {_ASKED_BY[name]}")
        return self._models[name]

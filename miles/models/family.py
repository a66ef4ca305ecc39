"""What every model family gives: its configuration in megatron-core's terms, its weight map, its tensor shapes.

A family is described by the Hugging Face (HF) `config.json` alone; a key that the family needs and the
file lacks is an error, never a default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.models.errors import ModelError, UnsupportedModelError
from miles.models.rope import RopeSpec
from miles.models.spellings import complete
from miles.models.weightmap import MapShape, WeightMap


@dataclass(frozen=True)
class FamilyConfig:
    """One model's shape. `transformer`: keyword arguments of megatron-core's TransformerConfig, no parallelism in it."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    heads: int
    groups: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied: bool
    rope: RopeSpec
    num_experts: int = 0
    experts_per_token: int = 0
    transformer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def map_shape(self) -> MapShape:
        return MapShape(
            num_layers=self.num_layers,
            heads=self.heads,
            groups=self.groups,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            tied=self.tied,
            num_experts=self.num_experts,
        )


@dataclass(frozen=True)
class Family:
    """`to_mcore(hf, rope_kind)` reads a config.json; `shapes(hf)` yields (tensor name, shape, "norm"|"weight");
    `hf_config(shape)` writes the config.json of a new checkpoint from a `ModelShape`."""

    name: str
    architectures: tuple[str, ...]
    to_mcore: Callable[..., FamilyConfig]
    weights: WeightMap
    shapes: Callable[[Mapping[str, Any]], Iterator[tuple[str, tuple[int, ...], str]]]
    hf_config: Callable[..., dict[str, Any]]


class HFConfig:
    """Typed access to a config.json: each value that is read is checked, missing keys are named."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = complete(values, where=where)
        self.where = where

    def integer(self, key: str) -> int:
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.where}: {key} must be an integer, got {value!r}")
        if value < 1:
            raise ModelError(f"{self.where}: {key} must be at least 1, got {value}; copy or download the file again")
        return value

    def number(self, key: str) -> float:
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.where}: {key} must be a number, got {value!r}")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self._get(key)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} must be true or false, got {value!r}")
        return value

    def require(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """An optional key: absent or one of `allowed`."""
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            raise UnsupportedModelError(
                f"{self.where}: {key} is {value!r}; {why}; supported: {', '.join(repr(item) for item in allowed)}"
            )

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise ModelError(f"{self.where}: {key} is missing; it must come from the checkpoint, no default is assumed")
        return self.values[key]


def read_hf_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json of a model folder, with main names; missing folder or file and broken JSON are named."""
    if directory.exists() and not directory.is_dir():
        raise ModelError(f"{directory}: is a file, not a model folder; give the folder that holds it")
    if not directory.is_dir():
        raise ModelError(
            f"{directory}: model folder does not exist; give a folder with config.json and safetensors files"
        )
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path}: file is missing; {directory} is not a Hugging Face model folder") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}; make it a file that you may read") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(values).__name__}")
    return complete(values, where=str(path))

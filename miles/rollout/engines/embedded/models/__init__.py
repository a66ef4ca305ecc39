"""Model families of the embedded engine: mathematics only, Hugging Face names, weights in live storage.

A family is one class with `from_config`, `parameters`, `aliases`, `hidden_states`, `logits` and the numbers that
size its cache. Add one: a module here and a line in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from miles.rollout.engines.embedded.models.qwen3 import Qwen3
from miles.rollout.engines.embedded.models.qwen3_moe import Qwen3Moe
from miles.rollout.engines.embedded.models.storage import ParameterStore
from miles.rollout.errors import EngineModelError

__all__ = ["Model", "build_model", "check_served"]

# (layer, q [n, heads, dim], k [n, kv_heads, dim], v [n, kv_heads, dim]) -> [n, heads * dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model(Protocol):
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    dtype: torch.dtype
    device: torch.device
    store: ParameterStore

    def parameters(self) -> Mapping[str, torch.Tensor]: ...
    def aliases(self) -> Mapping[str, str]: ...
    def hidden_states(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


FAMILIES: dict[str, type[Qwen3]] = {"qwen3": Qwen3, "qwen3_moe": Qwen3Moe}


def check_served(config: Mapping[str, Any]) -> None:
    """`EngineModelError` for a Hugging Face `config.json` that `build_model` would refuse."""
    _family(config).shape_class.from_config(config)


def build_model(config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device, context: int | None) -> Model:
    """An uninitialised model for a Hugging Face `config.json`; `EngineModelError` for an unknown family or option."""
    return _family(config).from_config(config, dtype=dtype, device=device, context=context)


def _family(config: Mapping[str, Any]) -> type[Qwen3]:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise EngineModelError(
            f"config.json: model_type {family!r} is not served by the embedded engine "
            f"(it serves {', '.join(FAMILIES)}); use engine.engine=sglang"
        )
    return FAMILIES[family]

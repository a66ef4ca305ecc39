"""What a model's forward costs per token, for schedules that balance compute (`data.balance: flops`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from miles.data.packing import AttentionLayer, FlopsShape
from miles.models import registry

_EXPERT = re.compile(r"\.experts\.\d+\.")


def flops_shape(
    hf_config: Mapping[str, Any], *, rope_kind: str | None = None, where: str = "config.json"
) -> FlopsShape:
    """Active parameters and attention layers of a parsed config.json.

    A matrix counts once per token; the input embedding is a look-up and counts only where it is also the output
    layer; of the routed experts' matrices only the chosen share counts.
    """
    family = registry.resolve(hf_config, where=where)
    model = family.to_mcore(hf_config, rope_kind=rope_kind, where=where)
    share = model.experts_per_token / model.num_experts if model.num_experts else 1.0
    active = 0.0
    for name, shape, _ in family.shapes(hf_config):
        if "embed_tokens" in name and not model.tied:
            continue
        active += math.prod(shape) * (share if _EXPERT.search(name) else 1.0)
    layer = AttentionLayer(model.heads, model.head_dim, model.head_dim)
    return FlopsShape(round(active), (layer,) * model.num_layers)

"""One reading of config.json, however the pinned transformers spells it.

Configuration classes rename attributes, move the rotary section and leave out what they derive; which of the forms a
file has depends on the version that wrote it and on the class. A file that states one thing twice with two values is
refused with both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.errors import ModelError, UnsupportedModelError

# Our name -> the other names that transformers reads or writes it under.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {"num_experts": ("num_local_experts",), "dtype": ("torch_dtype",)}
# Their configuration class has no head_dim: what a file leaves out is hidden_size / num_attention_heads.
_DERIVES_HEAD_DIM = frozenset({"qwen3_moe"})
_DTYPES = ("float32", "bfloat16", "float16")


def complete(values: Mapping[str, Any], *, where: str = "config.json") -> dict[str, Any]:
    """`values` with every main name that another name states; what else it holds stays, so that it can be written back.

    `ModelError` names both spellings and both values of a contradiction.
    """
    result = dict(values)
    for name, others in OTHER_NAMES.items():
        for other in others:
            if result.get(other) is None:
                continue
            if result.get(name) is None:
                result[name] = result[other]
            elif result[name] != result[other]:
                raise ModelError(
                    f"{where}: {name} is {result[name]!r} but {other} is {result[other]!r}, and both mean the same; "
                    "keep the one that the weights have"
                )
    heads, hidden = result.get("num_attention_heads"), result.get("hidden_size")
    if "num_key_value_heads" in result and result["num_key_value_heads"] is None:
        result["num_key_value_heads"] = heads
    if (
        result.get("head_dim") is None
        and result.get("model_type") in _DERIVES_HEAD_DIM
        and type(heads) is int
        and type(hidden) is int
        and heads > 0
    ):
        result["head_dim"] = hidden // heads
    return result


def stated_dtype(values: Mapping[str, Any], *, where: str = "config.json") -> str:
    """The dtype that exported weights get: what config.json states, else float32."""
    dtype = complete(values, where=where).get("dtype")
    if dtype is None:
        return "float32"
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"{where}: dtype is {dtype!r}; supported: {', '.join(_DTYPES)}")
    return str(dtype)


def rope_section(values: Mapping[str, Any], *, where: str = "config.json") -> dict[str, Any]:
    """The rotary settings under their names of transformers 5: `rope_type`, `rope_theta` and what the type needs.

    Read from `rope_parameters`, `rope_scaling` (with `type`), and the keys that may stand beside them.
    """
    found: dict[str, tuple[str, Any]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        section = values.get(key)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise ModelError(f"{where}: {key} must be an object, got {type(section).__name__}")
        for name, value in section.items():
            _state(found, "rope_type" if name == "type" else name, f"{key}.{name}", value, where)
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        _state(found, name, name, values.get(name), where)
    return {name: value for name, (_, value) in found.items()}


def _state(found: dict[str, tuple[str, Any]], name: str, place: str, value: Any, where: str) -> None:
    if value is None:
        return
    if name in found and found[name][1] != value:
        first, other = found[name]
        raise ModelError(f"{where}: {first} is {other!r} but {place} is {value!r}; keep the one that the weights have")
    found.setdefault(name, (place, value))

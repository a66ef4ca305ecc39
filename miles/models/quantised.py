"""A folder of quantised weights is recognised before its shapes and names surprise anyone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from miles.models.errors import ModelError
from miles.models.safetensors_header import Entry

QUANTISED = ("U8", "I8", "F4", "F8_E4M3", "F8_E5M2", "F8_E8M0")


def refuse_quantised(directory: Path, info: Mapping[str, Entry]) -> None:
    """`ModelError` for a model folder with weights of eight bits or fewer; `info`: its tensors by name."""
    found = sorted(name for name, entry in info.items() if entry.dtype in QUANTISED)
    if found:
        kind = _format(directory)
        raise ModelError(
            f"{directory}: holds quantised weights ({kind + '; ' if kind else ''}{found[0]} is {info[found[0]].dtype}), which "
            "are neither trained nor served from here; give the bf16 (or fp16, fp32) model that it was made from"
        )


def _format(directory: Path) -> str:
    """The format by config.json or by the quantisation contract, as far as they say."""
    stated = _object(directory / "config.json").get("quantization_config")
    if isinstance(stated, dict) and stated.get("quant_method"):
        words = [str(stated[key]) for key in ("quant_method", "quant_algo") if stated.get(key)]
        return f"config.json says {' '.join(words)}"
    contract = _object(directory / "quantization_contract.json").get("format")
    return f"its contract says {contract}" if contract else ""


def _object(path: Path) -> dict:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}

"""Live export of a trainer's weights as an NVFP4 checkpoint with its contract.

Takes a stream of Hugging Face tensors (what a backend's `state_for_sync` yields), packs the routed experts, and
writes shards of a bounded size. A contract given as `expected` must equal the written one, or nothing is COMPLETE.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant import contract as contracts
from miles.quant.contract import DIGEST_KEY, QuantContract, nvfp4_contract
from miles.quant.convert.bf16 import nvfp4_quantization_config
from miles.quant.convert.planning import compact_excludes, producer
from miles.quant.convert.run import COMPLETE
from miles.quant.convert.shards import DTYPES, INDEX, ShardWriter, TensorSpec, write_text
from miles.quant.errors import ConversionError
from miles.quant.packed import pack_named
from miles.quant.scope import Scope

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _write_shard(directory: Path, number: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    name = f"model-{number:05d}.safetensors"
    specs = [TensorSpec(n, _NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
    writer = ShardWriter(directory / name, specs, metadata)
    try:
        for n, tensor in tensors.items():
            writer.write(n, tensor.detach().cpu())
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    return name


def export_nvfp4(
    named: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    config: NVFP4QDQConfig,
    *,
    model_config: Mapping[str, Any],
    scope: Scope | None = None,
    expected: QuantContract | None = None,
    source_digest: str = "live",
    shard_bytes: int = 4 << 30,
) -> QuantContract:
    """Write an NVFP4 checkpoint into an empty `directory`; returns its contract. COMPLETE is written last.

    Metadata of a shard cannot hold the digest of a contract that is known at the end of the stream only; `config.json`
    repeats it.
    """
    directory, scope = Path(directory), scope or Scope()
    if directory.exists() and any(directory.iterdir()):
        raise ConversionError(f"{directory} is not empty; export into another directory")
    directory.mkdir(parents=True, exist_ok=True)
    quantised: list[str] = []
    kept: list[str] = []

    def watched() -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            (quantised if name in scope else kept).append(name)
            yield name, tensor

    weight_map: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    size = total = number = 0

    def flush() -> None:
        nonlocal size, number
        if pending:
            number += 1
            shard = _write_shard(directory, number, pending, {"format": "pt"})
            weight_map.update(dict.fromkeys(pending, shard))
            pending.clear()
            size = 0

    for name, tensor in pack_named(watched(), config, scope=scope):
        nbytes = tensor.numel() * tensor.element_size()
        if size and size + nbytes > shard_bytes:
            flush()
        pending[name] = tensor
        size += nbytes
        total += nbytes
    flush()
    if not quantised:
        raise ConversionError(f"{directory}: the stream held no routed-expert weight to quantise")
    found = nvfp4_contract(
        config, quantised, source_digest=source_digest, producer=producer("live export"), ignore=scope.ignore.compact()
    )
    if expected is not None:
        contracts.require_equal(expected, found, where=f"export to {directory}")
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(directory / INDEX, json.dumps(index, indent=1) + "\n")
    quantization = nvfp4_quantization_config(config, compact_excludes(kept, quantised))
    new = {**model_config, "quantization_config": {**quantization, DIGEST_KEY: found.digest()}}
    write_text(directory / "config.json", json.dumps(new, indent=1) + "\n")
    contracts.write(directory, found)
    write_text(directory / COMPLETE, found.digest() + "\n")
    return found

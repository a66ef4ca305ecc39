"""A trainer's weights as an NVFP4 checkpoint with its contract.

Takes a stream of Hugging Face tensors (of a checkpoint, or what a backend's `state_for_sync` yields), packs the routed experts, and
writes shards of a bounded size. Shards keep temporary names until the stream has ended and the contract is known;
one given as `expected` must equal it, or nothing is published.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from miles.config.files import storage_error, write_atomic
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.models.hf_files import copy_tokenizer_files
from miles.quant import contract as contracts
from miles.quant.contract import DIGEST_KEY, QuantContract, nvfp4_contract
from miles.quant.convert.journal import COMPLETE
from miles.quant.convert.planning import compact_excludes, producer
from miles.quant.convert.shards import DTYPES, ShardWriter, TensorSpec
from miles.quant.convert.to_nvfp4 import nvfp4_quantization_config
from miles.quant.errors import ConversionError
from miles.quant.headers import INDEX
from miles.quant.packed import pack_named
from miles.quant.scope import Scope

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Stands in a shard's metadata until the contract's digest, which has the same length, is known.
UNKNOWN = "?" * 64


class _Shards:
    """Shards of at most `limit` bytes under temporary names; `publish` stamps the digest and renames them."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory, limit
        self.writers: list[ShardWriter] = []
        self.weight_map: dict[str, str] = {}
        self.total = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._size = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        if self._size and self._size + nbytes > self.limit:
            self._flush()
        self._pending[name] = tensor
        self._size += nbytes
        self.total += nbytes

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self.directory / f"model-{len(self.writers) + 1:05d}.safetensors"
        specs = [TensorSpec(n, _NAMES[t.dtype], tuple(t.shape)) for n, t in self._pending.items()]
        self.writers.append(writer := ShardWriter(path, specs, {"format": "pt", DIGEST_KEY: UNKNOWN}))
        for name, tensor in self._pending.items():
            writer.write(name, tensor.detach().cpu())
            self.weight_map[name] = path.name
        writer.finish()
        self._pending.clear()
        self._size = 0

    def finish(self) -> None:
        self._flush()

    def publish(self, digest: str) -> None:
        for writer in self.writers:
            writer.stamp(UNKNOWN, digest)
            writer.publish()

    def abort(self) -> None:
        for writer in self.writers:
            writer.abort()


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
    tokenizer_dir: Path | None = None,
) -> QuantContract:
    """Write an NVFP4 checkpoint into an empty `directory`; returns its contract. COMPLETE is written last.

    ConversionError: a directory in use, a stream without routed experts or with half a gate/up pair, a full disk.
    """
    directory, scope = Path(directory), scope or Scope()
    if directory.exists() and any(directory.iterdir()):
        raise ConversionError(f"{directory} is not empty; export into another directory")
    quantised: list[str] = []
    kept: list[str] = []

    def watched() -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            (quantised if name in scope else kept).append(name)
            yield name, tensor

    shards = _Shards(directory, shard_bytes)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, tensor in pack_named(watched(), config, scope=scope):
            shards.add(name, tensor)
        shards.finish()
        if not quantised:
            raise ConversionError(f"{directory}: the stream held no routed-expert weight to quantise")
        ignore = scope.ignore.compact()
        found = nvfp4_contract(
            config, quantised, source_digest=source_digest, producer=producer("live export"), ignore=ignore
        )
        if expected is not None:
            contracts.require_equal(expected, found, where=f"export to {directory}")
        shards.publish(found.digest())
    except BaseException as error:
        shards.abort()
        if isinstance(error, OSError):
            raise ConversionError(f"{storage_error(directory, error)}; nothing was published") from error
        if isinstance(error, ValueError) and not isinstance(error, ConversionError):
            raise ConversionError(f"export to {directory}: {error}") from error
        raise
    index = {"metadata": {"total_size": shards.total}, "weight_map": dict(sorted(shards.weight_map.items()))}
    write_atomic(directory / INDEX, json.dumps(index, indent=1) + "\n")
    quantization = nvfp4_quantization_config(config, compact_excludes(kept, quantised))
    new = {**model_config, "quantization_config": {**quantization, DIGEST_KEY: found.digest()}}
    write_atomic(directory / "config.json", json.dumps(new, indent=1) + "\n")
    if tokenizer_dir is not None:
        copy_tokenizer_files(tokenizer_dir, directory)
    contracts.write(directory, found)
    write_atomic(directory / COMPLETE, found.digest() + "\n")
    return found

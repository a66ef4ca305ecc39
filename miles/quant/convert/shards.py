"""Safetensors checkpoints, header first: read any tensor alone, write a shard tensor by tensor.

A shard's header is known before its data (shapes follow from the plan), so one tensor is resident at a time. A
shard is written under `.tmp`, flushed to disk, then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from miles.quant.errors import ConversionError

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
SIZES = {name: torch.empty(0, dtype=dtype).element_size() for name, dtype in DTYPES.items()}
MAX_HEADER = 100 << 20


@dataclass(frozen=True)
class TensorSpec:
    """Name, safetensors dtype and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = SIZES[self.dtype]
        for d in self.shape:
            size *= d
        return size


@dataclass(frozen=True)
class Stored:
    """A tensor of a source checkpoint: its spec, its shard and its place in the file."""

    spec: TensorSpec
    shard: str
    offset: int


def read_header(path: Path) -> tuple[dict, int]:
    """(header, offset of the data). Raises ConversionError on a truncated or malformed file."""
    size = path.stat().st_size
    with open(path, "rb") as f:
        raw = f.read(8)
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else MAX_HEADER + 1
        if length > min(MAX_HEADER, size - 8):
            raise ConversionError(f"{path}: no safetensors header ({size} bytes)")
        try:
            header = json.loads(f.read(length))
        except ValueError as error:
            raise ConversionError(f"{path}: header is no JSON: {error}") from error
    end = max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0)
    if size != 8 + length + end:
        raise ConversionError(f"{path}: truncated, {size} bytes where the header needs {8 + length + end}")
    return header, 8 + length


class Source:
    """A checkpoint directory: `tensors` by name, `shards` in order, `config` (config.json or {})."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        index = self.directory / INDEX
        if index.exists():
            weight_map = json.loads(index.read_text())["weight_map"]
            self.shards = sorted(set(weight_map.values()))
        else:
            weight_map = None
            self.shards = sorted(p.name for p in self.directory.glob("*.safetensors"))
        if not self.shards:
            raise ConversionError(f"{self.directory}: no safetensors file")
        self.tensors: dict[str, Stored] = {}
        digest = hashlib.sha256()
        for shard in self.shards:
            path = self.directory / shard
            if not path.exists():
                raise ConversionError(f"{path}: named in {INDEX} but missing")
            header, data = read_header(path)
            digest.update(f"{shard} {path.stat().st_size} {json.dumps(header, sort_keys=True)}".encode())
            self._add(shard, header, data)
        if weight_map is not None and (
            wrong := {n for n, s in weight_map.items() if n not in self.tensors or self.tensors[n].shard != s}
        ):
            raise ConversionError(f"{index}: not in the shard it names: {', '.join(sorted(wrong)[:5])}")
        digest.update(json.dumps(self.config, sort_keys=True).encode())
        self.digest = digest.hexdigest()

    def _add(self, shard: str, header: dict, data: int) -> None:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise ConversionError(f"{shard}: {name} has dtype {entry['dtype']}, which is not supported")
            if name in self.tensors:
                raise ConversionError(f"{name} is in {self.tensors[name].shard} and in {shard}")
            spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]))
            begin, end = entry["data_offsets"]
            if end - begin != spec.nbytes:
                raise ConversionError(f"{shard}: {name} has {end - begin} bytes, its shape needs {spec.nbytes}")
            self.tensors[name] = Stored(spec, shard, data + begin)

    @cached_property
    def config(self) -> dict:
        path = self.directory / "config.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def nbytes(self) -> int:
        return sum(t.spec.nbytes for t in self.tensors.values())

    def load(self, name: str) -> torch.Tensor:
        """One tensor, read into memory of its own."""
        stored = self.tensors[name]
        buffer = np.empty(stored.spec.nbytes, dtype=np.uint8)
        with open(self.directory / stored.shard, "rb") as f:
            f.seek(stored.offset)
            if f.readinto(memoryview(buffer)) != stored.spec.nbytes:
                raise ConversionError(f"{stored.shard}: {name} is cut off")
        return torch.from_numpy(buffer).view(DTYPES[stored.spec.dtype]).view(stored.spec.shape)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, without a copy when it is contiguous."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


class ShardWriter:
    """Writes the tensors of `specs` in order under `.tmp`; `commit` makes the file final."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> None:
        self.path, self.specs = path, list(specs)
        self.temporary = path.with_name(path.name + ".tmp")
        header: dict = {"__metadata__": dict(metadata)}
        offset = 0
        for spec in self.specs:
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            offset += spec.nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._next = 0
        self._file = open(self.temporary, "wb")  # noqa: SIM115  (closed by commit or abort)
        self._write(struct.pack("<Q", len(raw)) + raw)

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        spec = self.specs[self._next]
        if name != spec.name or tuple(tensor.shape) != spec.shape or tensor.dtype != DTYPES[spec.dtype]:
            raise AssertionError(f"planned {spec}, got {name} {tuple(tensor.shape)} {tensor.dtype}")
        self._next += 1
        self._write(as_bytes(tensor))

    def commit(self) -> None:
        if self._next != len(self.specs):
            raise AssertionError(f"{self.path.name}: {len(self.specs) - self._next} planned tensors were not written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self.temporary, self.path)
        sync_directory(self.path.parent)

    def abort(self) -> None:
        self._file.close()
        self.temporary.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Atomic: `.tmp`, fsync, rename."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)

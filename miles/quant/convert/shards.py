"""Safetensors checkpoints, header first: read any tensor alone, write a shard tensor by tensor.

A shard's header is known before its data (shapes follow from the plan), so one tensor is resident at a time. A
shard is written under `.tmp`, flushed to disk, then renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from miles.config.files import sync_folder
from miles.quant.errors import ConversionError
from miles.quant.headers import DAMAGED, Header, quantization_of, read_headers, read_json

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
# Two elements in a byte, and no number type of torch: read as bytes, never written.
FOUR_BITS = "F4"
SIZES = {name: torch.empty(0, dtype=dtype).element_size() for name, dtype in DTYPES.items()}
SAMPLE = 1 << 16


@dataclass(frozen=True)
class TensorSpec:
    """Name, safetensors dtype and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        elements = math.prod(self.shape)
        return elements // 2 if self.dtype == FOUR_BITS else SIZES[self.dtype] * elements


@dataclass(frozen=True)
class Stored:
    """A tensor of a source checkpoint: its spec, its shard and its place in the file."""

    spec: TensorSpec
    shard: str
    offset: int


class Source:
    """A checkpoint directory: `tensors` by name, `shards` in order, `config` (config.json or {}).

    `digest` covers every header, config.json, and the first, middle and last 64 KiB of each shard: two checkpoints of
    one model differ in it, without a full read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        if self.directory.is_file():
            raise ConversionError(f"{self.directory} is a file; give the checkpoint folder that holds it")
        if not self.directory.is_dir():
            raise ConversionError(
                f"{self.directory}: no such folder; give a checkpoint folder with *.safetensors files"
            )
        headers = read_headers(self.directory)
        if not headers:
            raise ConversionError(
                f"{self.directory}: no safetensors file; give a checkpoint folder with *.safetensors files"
            )
        self._refuse_broken_links()
        self.shards = list(headers)
        self.tensors: dict[str, Stored] = {}
        digest = hashlib.sha256()
        for shard, header in headers.items():
            self._add(shard, header)
            digest.update(f"{shard} {(self.directory / shard).stat().st_size} ".encode() + header.raw)
            digest.update(self._sample(shard))
        digest.update(json.dumps(self.config, sort_keys=True).encode())
        self.digest = digest.hexdigest()

    def _refuse_broken_links(self) -> None:
        """They would be missing in a copy of this folder."""
        for path in sorted(self.directory.iterdir()):
            if path.is_symlink() and not path.exists():
                raise ConversionError(f"{path}: a link to a file that is not there; {DAMAGED}, or remove the link")

    def files(self) -> dict[str, list[int]]:
        """Size and time of the last change of each shard: what `digest`, which samples, may not notice."""
        found = {shard: (self.directory / shard).stat() for shard in self.shards}
        return {shard: [stat.st_size, stat.st_mtime_ns] for shard, stat in found.items()}

    def unlisted(self) -> list[str]:
        """Safetensors files of the folder that its index does not name: no reader loads them, no conversion reads them."""
        return sorted(p.name for p in self.directory.glob("*.safetensors") if p.is_file() and p.name not in self.shards)

    def folders(self, *, without: Path) -> list[str]:
        """Names of subfolders, which conversions do not copy; `without`: the target, which may be inside."""
        return sorted(p.name for p in self.directory.iterdir() if p.is_dir() and p.resolve() != without.resolve())

    def _add(self, shard: str, header: Header) -> None:
        path = self.directory / shard
        for name, entry in header.tensors.items():
            if entry.dtype not in DTYPES and entry.dtype != FOUR_BITS:
                raise ConversionError(
                    f"{path}: {name} has dtype {entry.dtype}; a converter reads {', '.join((*DTYPES, FOUR_BITS))}"
                )
            if entry.dtype == FOUR_BITS and (not entry.shape or entry.shape[-1] % 2):
                raise ConversionError(
                    f"{path}: {name} has shape {list(entry.shape)}, F4 needs an even last size; {DAMAGED}"
                )
            spec = TensorSpec(name, entry.dtype, entry.shape)
            if entry.end - entry.begin != spec.nbytes:
                raise ConversionError(
                    f"{path}: {name} has {entry.end - entry.begin} bytes, its shape needs {spec.nbytes}; {DAMAGED}"
                )
            self.tensors[name] = Stored(spec, shard, header.data + entry.begin)

    def _sample(self, shard: str) -> bytes:
        size = (self.directory / shard).stat().st_size
        parts = []
        with open(self.directory / shard, "rb") as f:
            for start in (0, size // 2, max(0, size - SAMPLE)):
                f.seek(start)
                parts.append(f.read(SAMPLE))
        return b"".join(parts)

    @cached_property
    def config(self) -> dict:
        path = self.directory / "config.json"
        return read_json(path) if path.exists() else {}

    @property
    def quantization(self) -> dict:
        """`quantization_config` of config.json, or {}."""
        return quantization_of(self.config, self.directory / "config.json")

    @property
    def nbytes(self) -> int:
        return sum(t.spec.nbytes for t in self.tensors.values())

    def load(self, name: str) -> torch.Tensor:
        """One tensor, read into memory of its own; F4 [..., K] as bytes uint8 [..., K/2], even columns in the low half."""
        stored = self.tensors[name]
        if not stored.spec.nbytes and stored.spec.dtype != FOUR_BITS:
            return torch.empty(stored.spec.shape, dtype=DTYPES[stored.spec.dtype])
        buffer = np.empty(stored.spec.nbytes, dtype=np.uint8)
        with open(self.directory / stored.shard, "rb") as f:
            f.seek(stored.offset)
            if f.readinto(buffer.data) != stored.spec.nbytes:
                raise ConversionError(f"{self.directory / stored.shard}: {name} is cut off; {DAMAGED}")
        if stored.spec.dtype == FOUR_BITS:
            return torch.from_numpy(buffer).view(*stored.spec.shape[:-1], stored.spec.shape[-1] // 2)
        return torch.from_numpy(buffer).view(DTYPES[stored.spec.dtype]).view(stored.spec.shape)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, without a copy when it is contiguous."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


class ShardWriter:
    """Writes the tensors of `specs` in order under `.tmp`.

    `commit` makes the file final. `finish` makes it durable under its temporary name, where `stamp` may still replace
    metadata values by others of the same length; `publish` then renames it. `written` is given all bytes in order.
    """

    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        written: Callable[[bytes | memoryview], object] | None = None,
    ) -> None:
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
        self._written = written
        self._file = open(self.temporary, "wb")  # noqa: SIM115  (closed by finish or abort)
        try:
            self._put(struct.pack("<Q", len(raw)) + raw)
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        spec = self.specs[self._next]
        if name != spec.name or tuple(tensor.shape) != spec.shape or tensor.dtype != DTYPES[spec.dtype]:
            raise AssertionError(f"planned {spec}, got {name} {tuple(tensor.shape)} {tensor.dtype}")
        self._next += 1
        self._put(as_bytes(tensor))

    def _put(self, data: bytes | memoryview) -> None:
        if self._written is not None:
            self._written(data)
        self._file.write(data)

    def finish(self) -> None:
        if self._next != len(self.specs):
            raise AssertionError(f"{self.path.name}: {len(self.specs) - self._next} planned tensors were not written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def stamp(self, old: str, new: str) -> None:
        """Replace the metadata value `old` in the finished file; both have the same length."""
        assert len(old) == len(new)
        with open(self.temporary, "r+b") as f:
            length = struct.unpack("<Q", f.read(8))[0]
            raw = f.read(length)
            assert raw.count(old.encode()) == 1
            f.seek(8)
            f.write(raw.replace(old.encode(), new.encode()))
            f.flush()
            os.fsync(f.fileno())

    def publish(self) -> None:
        os.replace(self.temporary, self.path)
        sync_folder(self.path.parent)

    def commit(self) -> None:
        self.finish()
        self.publish()

    def abort(self) -> None:
        # On a full disk closing fails too, when it flushes what was buffered.
        with contextlib.suppress(OSError):
            self._file.close()
        self.temporary.unlink(missing_ok=True)

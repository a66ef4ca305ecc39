"""Reading and writing Hugging Face model folders: safetensors shards, index, tokenizer files.

Reads only the slices asked for. A missing shard, a truncated file, a wrong shape or dtype is an error
with file, tensor, expected and got. Folders are written under a temporary name and renamed, so that a
reader never sees half a folder.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles.config.files import storage_error, sync_folder
from miles.models.errors import ModelError
from miles.models.packed_experts import Part, unpacked
from miles.models.quantised import refuse_quantised
from miles.models.safetensors_header import DAMAGED, Entry, read_header

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
# Unsigned integers of a value's width, and the bits of its exponent: all set where it is infinite or no number.
_EXPONENTS: dict[str, tuple[np.dtype[Any], int]] = {
    "F32": (np.dtype("<u4"), 0x7F800000),
    "BF16": (np.dtype("<u2"), 0x7F80),
    "F16": (np.dtype("<u2"), 0x7C00),
    "F64": (np.dtype("<u8"), 0x7FF0000000000000),
}


class HFCheckpoint:
    """A model folder's tensors, read slice by slice. Open files are kept until `close`.

    Experts that a file packs into one tensor a layer appear one by one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file_of: dict[str, Path] = {}
        self.info: dict[str, Entry] = {}
        self._parts: dict[str, Part] = {}
        stored: dict[str, Path] = {}
        for path in _shards(directory):
            tensors = read_header(path).tensors
            stored.update(dict.fromkeys(tensors, path))
            for name, entry, part in unpacked(tensors):
                if name in self.file_of:
                    raise ModelError(f"{path}: tensor {name} is also in {self.file_of[name].name}")
                self.file_of[name] = path
                self.info[name] = entry
                if part is not None:
                    self._parts[name] = part
        self._check_index(stored)
        refuse_quantised(directory, self.info)
        self._open: dict[Path, Any] = {}

    def names(self) -> Iterable[str]:
        return self.file_of.keys()

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Shape and dtype of one tensor before anything is read."""
        if name not in self.file_of:
            raise ModelError(f"{self.directory}: tensor {name} is missing, expected shape {list(shape)}")
        got = self.info[name]
        if got.shape != tuple(shape):
            raise ModelError(
                f"{self.file_of[name]}: tensor {name}: expected shape {list(shape)}, got {list(got.shape)}"
            )
        if got.dtype not in _DTYPES:
            raise ModelError(
                f"{self.file_of[name]}: tensor {name}: expected a floating dtype "
                f"({', '.join(sorted(_DTYPES))}), got {got.dtype}"
            )
        needed = math.prod(shape) * _EXPONENTS[got.dtype][0].itemsize
        if got.nbytes != needed:
            raise ModelError(
                f"{self.file_of[name]}: tensor {name}: expected {needed} bytes, its header gives {got.nbytes}; {DAMAGED}"
            )

    def nbytes(self) -> int:
        """Bytes of all tensors, by their headers."""
        return sum(entry.nbytes for entry in self.info.values())

    def check_finite(self) -> None:
        """`ModelError` names the first tensor with an infinite value or one that is not a number. Reads everything."""
        for path in sorted(set(self.file_of.values())):
            data = path.read_bytes()
            start = 8 + int.from_bytes(data[:8], "little")
            for name, entry in self.info.items():
                if self.file_of[name] != path or entry.dtype not in _EXPONENTS:
                    continue
                kind, exponent = _EXPONENTS[entry.dtype]
                bits = np.frombuffer(data[start + entry.begin : start + entry.end], dtype=kind)
                bad = int(np.count_nonzero((bits & exponent) == exponent))
                if bad:
                    raise ModelError(
                        f"{path}: tensor {name}: {bad} of {bits.size} values are not finite; copy or download the "
                        "file again, or start from an earlier checkpoint"
                    )

    def read(self, name: str, axis: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        """The tensor, or its rows (axis 0) or columns (axis 1) `[start, stop)`."""
        handle = self._handle(self.file_of[name])
        part = self._parts.get(name)
        if part is not None:
            view, first = handle.get_slice(part.source), part.start
            if axis == 0:
                return view[part.expert, first + start : first + stop]
            rows = view[part.expert, first : part.stop]
            return rows if axis is None else rows[:, start:stop]
        if axis is None:
            return handle.get_tensor(name)
        view = handle.get_slice(name)
        return view[start:stop] if axis == 0 else view[:, start:stop]

    def close(self) -> None:
        self._open.clear()

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            from safetensors import safe_open

            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def _check_index(self, stored: Mapping[str, Path]) -> None:
        path = self.directory / _INDEX
        if not path.exists():
            return
        listed = _index(path)
        lost = sorted(name for name, shard in listed.items() if stored.get(name) != self.directory / shard)
        if lost:
            raise ModelError(
                f"{path}: these tensors are not in the shard that the index names: "
                + ", ".join(f"{name} ({listed[name]})" for name in lost[:20])
            )


def is_shard_name(name: object) -> bool:
    """A plain name of a safetensors file: an index must not lead to other folders, nor to a folder's other files."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or not name.isprintable():
        return False
    return not any(mark in name for mark in "/\\") and len(name.encode()) <= 255


def _index(path: Path) -> dict[str, str]:
    try:
        listed = json.loads(path.read_text())["weight_map"]
        strange = sorted({ascii(name) for name in listed.values() if not is_shard_name(name)})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a safetensors index: {error}") from None
    if strange:
        raise ModelError(
            f"{path}: weight_map names {strange[0]}, which is not the plain name of a *.safetensors file in this folder; "
            + DAMAGED
        )
    return listed


def _shards(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.exists():
        paths = [directory / name for name in sorted(set(_index(index).values()))]
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            raise ModelError(f"{directory}: missing shards named by {_INDEX}: {', '.join(missing)}")
        return paths
    single = directory / "model.safetensors"
    if not single.exists():
        raise ModelError(f"{directory}: neither model.safetensors nor {_INDEX} is there; is this a model folder?")
    return [single]


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copy whichever tokenizer and generation files `source` has."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def publish_folder(temporary: Path, target: Path) -> None:
    """Make every file of `temporary` durable and give it its final name; an older `target` is replaced."""
    for path in temporary.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(temporary)
    aside = target.with_name(f".{target.name}.old")
    if aside.exists():
        shutil.rmtree(aside)
    if target.exists():
        target.rename(aside)
    temporary.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _system_error(error: BaseException | None) -> OSError | None:
    """The operating system's error inside one of the safetensors library's, which hides it in its text."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else None


class FolderWriter:
    """`with FolderWriter(target) as folder:` fills a temporary folder and publishes it whole, or removes it."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.temporary = target.with_name(f".{target.name}.tmp{os.getpid()}")

    def __enter__(self) -> Path:
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir()
        except OSError as error:
            raise storage_error(self.target, error) from error
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            try:
                publish_folder(self.temporary, self.target)
            except OSError as problem:
                shutil.rmtree(self.temporary, ignore_errors=True)
                raise storage_error(self.target, problem) from problem
            return
        shutil.rmtree(self.temporary, ignore_errors=True)
        failure = error if isinstance(error, OSError) else _system_error(error)
        if failure is not None:
            raise storage_error(self.target, failure) from error


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def write_shards(directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int = 4 << 30) -> None:
    """Write `tensors` in order into one `model.safetensors`, or into numbered shards with an index.

    One shard of tensors is held in memory at a time.
    """
    from safetensors.torch import save_file

    shards: list[tuple[Path, list[str]]] = []
    held: dict[str, torch.Tensor] = {}
    total = size = 0

    def flush() -> None:
        nonlocal size
        path = directory / f"part-{len(shards)}.safetensors"
        save_file(held, path, metadata={"format": "pt"})
        shards.append((path, list(held)))
        held.clear()
        size = 0

    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor.detach().to("cpu").contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        shards[0][0].rename(directory / "model.safetensors")
        return
    weight_map = {}
    for number, (path, names) in enumerate(shards, start=1):
        final = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(final)
        weight_map.update(dict.fromkeys(names, final.name))
    write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

"""Wire form of one weight bucket, and its digest: what a trainer writes and an engine verifies.

A bucket is a flat run of bytes; its header names the pieces in it. Both the sender (`miles.sync`) and the
embedded engine (`miles.rollout`) build on this module, which knows no HTTP, no engine and no plan.

Layout: piece offsets are multiples of max(16, itemsize), gaps are zero, values little-endian as torch stores
them. A piece lands in a whole destination, or in the slot `slot` of a fused one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from miles.config import MilesError

SCHEMA = 1
MASK64 = (1 << 64) - 1
MAX_NAME, MAX_DIMS, MAX_PIECES = 512, 8, 1 << 16
_DIGEST = re.compile(r"0x[0-9a-f]{1,16}")
WORDS_PER_CHUNK = 1 << 16

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint8", "bool",
    )
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

SCALES = ("none", "tensor", "block128_fp32", "block128_e8m0", "mx32_e8m0", "nvfp4")

Slot = tuple[tuple[int, int], ...]


class WeightWireError(MilesError):
    """A bucket header or handle breaks the wire form; names the field and what was found."""


def dtype_name(dtype: torch.dtype) -> str:
    """Wire name of a torch dtype; `WeightWireError` for one that has none."""
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise WeightWireError(f"dtype {dtype} has no wire name; cast to one of {', '.join(DTYPES)}") from None


def align_up(offset: int, itemsize: int) -> int:
    """Smallest multiple of max(16, itemsize) that is >= offset."""
    alignment = max(16, itemsize)
    return -(-offset // alignment) * alignment


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in row-major order as a 1-d uint8 view (a copy only if it is not contiguous)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@lru_cache(maxsize=4)
def _odd_numbers(device: str) -> torch.Tensor:
    return torch.arange(WORDS_PER_CHUNK, dtype=torch.int64, device=device) * 2 + 1


def digest(tensor: torch.Tensor) -> int:
    """Order-sensitive 64-bit digest of a tensor's bytes, the same on every device.

    With w_i the little-endian 32-bit words of the bytes, zero-padded at the end:
    sum_i (w_i + 1)(2i + 1) mod 2^64, xor the number of bytes. Integer sums are associative modulo 2^64, so
    any chunking and any reduction order gives the same value. It detects corruption, not an adversary.
    """
    raw = as_bytes(tensor)
    nbytes = raw.numel()
    if nbytes == 0:
        return 0
    if nbytes % 4 or raw.storage_offset() % 4:
        padded = torch.zeros(-(-nbytes // 4) * 4, dtype=torch.uint8, device=raw.device)
        padded[:nbytes] = raw
        raw = padded
    words = raw.view(torch.int32)
    odd = _odd_numbers(str(words.device))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), WORDS_PER_CHUNK):
        # Two's complement products and sums wrap modulo 2^64, which is the arithmetic asked for.
        chunk = words[start : start + WORDS_PER_CHUNK].to(torch.int64).bitwise_and_(0xFFFFFFFF).add_(1)
        if start:
            total += chunk.sum() * (2 * start)
        total += chunk.mul_(odd[: chunk.numel()]).sum()
    return (int(total.item()) & MASK64) ^ nbytes


@dataclass(frozen=True, slots=True)
class Piece:
    """One array inside a bucket.

    `shape` is the piece's own shape. `slot` gives [start, stop) along the destination's leading dimensions
    when the destination is fused (q/k/v, gate/up, packed experts) and is None for a whole destination.
    `scale` is the scale format the sender believes the destination to have; the receiver compares it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    scale: str = "none"
    slot: Slot | None = None

    def to_wire(self) -> list[Any]:
        return [self.name, self.dtype, list(self.shape), self.offset, self.nbytes, self.scale, self.slot]

    @classmethod
    def from_wire(cls, wire: Any) -> Piece:
        """Strict reader: seven fields of the right type, nbytes equal to shape times itemsize."""
        if not isinstance(wire, list) or len(wire) != 7:
            raise WeightWireError(f"bucket piece must be a list of 7 fields, got {wire!r:.80}")
        name, dtype, shape, offset, nbytes, scale, slot = wire
        if not all(isinstance(text, str) and len(text) <= MAX_NAME for text in (name, dtype, scale)):
            raise WeightWireError(f"bucket piece: name, dtype and scale must be texts of at most {MAX_NAME} characters")
        if dtype not in DTYPES or scale not in SCALES:
            raise WeightWireError(f"bucket piece {name!r}: dtype {dtype!r} or scale {scale!r} is unknown")
        if not _is_counts(shape) or len(shape) > MAX_DIMS or not _is_counts([offset, nbytes]):
            raise WeightWireError(f"bucket piece {name}: shape, offset and nbytes must be integers >= 0")
        numel = 1
        for size in shape:
            numel *= size
        itemsize = DTYPES[dtype].itemsize
        if numel * itemsize != nbytes or offset % max(16, itemsize):
            raise WeightWireError(
                f"bucket piece {name}: {nbytes} bytes at offset {offset} do not fit shape {shape} of {dtype}"
            )
        if slot is not None:
            good = isinstance(slot, list) and len(slot) <= MAX_DIMS
            if not good or not all(_is_counts(pair) and len(pair) == 2 for pair in slot):
                raise WeightWireError(f"bucket piece {name}: slot must be [[start, stop], ...], got {slot!r:.80}")
            slot = tuple((start, stop) for start, stop in slot)
        return cls(name, dtype, tuple(shape), offset, nbytes, scale, slot)


@dataclass(frozen=True, slots=True)
class BucketHeader:
    """What travels beside a bucket's bytes. `digest` is None when this sync is not checksummed."""

    version: int
    sequence: int
    nbytes: int
    pieces: tuple[Piece, ...]
    digest: int | None

    def to_wire(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "version": str(self.version),
            "sequence": self.sequence,
            "count": len(self.pieces),
            "nbytes": self.nbytes,
            "pieces": [piece.to_wire() for piece in self.pieces],
            "digest": None if self.digest is None else f"{self.digest:#x}",
        }

    @classmethod
    def from_wire(cls, wire: Any) -> BucketHeader:
        """Strict reader; refuses another schema, a wrong count and pieces that overlap or leave the bucket."""
        if not isinstance(wire, Mapping):
            raise WeightWireError(f"bucket header must be an object, got {type(wire).__name__}")
        if wire.get("schema") != SCHEMA:
            raise WeightWireError(f"bucket header schema {wire.get('schema')!r}: this engine reads schema {SCHEMA}")
        pieces_wire, version = wire.get("pieces"), parse_version(wire.get("version"))
        if not _is_counts([wire.get("sequence"), wire.get("nbytes")]) or not isinstance(pieces_wire, list):
            raise WeightWireError("bucket header needs sequence, nbytes (integers >= 0) and pieces (a list)")
        if len(pieces_wire) > MAX_PIECES:
            raise WeightWireError(f"bucket header lists {len(pieces_wire)} pieces, more than {MAX_PIECES}")
        if wire.get("count") != len(pieces_wire):
            raise WeightWireError(f"bucket header says {wire.get('count')!r} pieces and lists {len(pieces_wire)}")
        pieces = tuple(Piece.from_wire(piece) for piece in pieces_wire)
        end = 0
        for piece in pieces:
            if piece.offset < end:
                raise WeightWireError(f"bucket piece {piece.name} at {piece.offset} overlaps the one before it")
            end = piece.offset + piece.nbytes
        if end > wire["nbytes"]:
            raise WeightWireError(f"bucket pieces end at byte {end}, the header says {wire['nbytes']} bytes")
        return cls(version, wire["sequence"], wire["nbytes"], pieces, _parse_digest(wire.get("digest")))


def piece_view(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece inside a uint8 bucket, as a view with its own dtype and shape (no copy)."""
    raw = buffer[piece.offset : piece.offset + piece.nbytes]
    return raw.view(DTYPES[piece.dtype]).view(piece.shape)


def parse_version(wire: Any) -> int:
    """A weight version travels as a decimal string of an int64 >= 0."""
    # The length comes first: Python refuses to read thousands of digits, with an error of its own.
    good = isinstance(wire, str) and len(wire) <= 19 and wire.isascii() and wire.isdigit()
    if not good or str(int(wire)) != wire:
        raise WeightWireError(f"weight version must be a decimal string, got {wire!r:.40}")
    if int(wire) >= 1 << 63:
        raise WeightWireError(f"weight version {wire} does not fit int64")
    return int(wire)


def host_identity() -> str:
    """Equal for two processes that can hand each other memory through /proc: same boot, same PID namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


def _parse_digest(wire: Any) -> int | None:
    if wire is None:
        return None
    if not isinstance(wire, str) or not _DIGEST.fullmatch(wire):
        raise WeightWireError(f"bucket digest must be 0x and 1 to 16 hex digits, or null, got {wire!r:.40}")
    return int(wire, 16)


def _is_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)

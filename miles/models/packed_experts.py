"""Routed experts in one tensor a layer, as transformers keeps them in memory and may save them.

`mlp.experts.gate_up_proj` [experts, 2 * width, hidden] and `mlp.experts.down_proj` [experts, hidden, width] are seen
under the names of single experts. Each of those is one stretch of the packed tensor's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from miles.models.safetensors_header import Entry

_PACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Part:
    """Rows `[start, stop)` of one expert in the packed tensor `source`."""

    source: str
    expert: int
    start: int
    stop: int


def is_packed(name: str, entry: Entry) -> bool:
    """Whether a tensor holds all experts of a layer."""
    found = _PACKED.fullmatch(name)
    return found is not None and len(entry.shape) == 3 and (found[2] == "down_proj" or entry.shape[1] % 2 == 0)


def unpacked(tensors: Mapping[str, Entry]) -> Iterator[tuple[str, Entry, Part | None]]:
    """(name, entry, where it lies in a packed tensor or None) of all tensors, experts one by one."""
    for name, entry in tensors.items():
        if not is_packed(name, entry):
            yield name, entry, None
            continue
        prefix, _, kind = name.rpartition(".")
        experts, rows, width = entry.shape
        halves = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
        height = rows // len(halves)
        size = entry.nbytes // max(experts * len(halves), 1)
        for expert in range(experts):
            for number, half in enumerate(halves):
                begin = entry.begin + (expert * len(halves) + number) * size
                part = Entry(entry.dtype, (height, width), begin, begin + size)
                yield (
                    f"{prefix}.{expert}.{half}.weight",
                    part,
                    Part(name, expert, number * height, (number + 1) * height),
                )

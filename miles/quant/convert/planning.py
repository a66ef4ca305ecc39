"""Pieces that every conversion's plan uses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from miles.quant.convert.run import Item
from miles.quant.convert.shards import Source
from miles.quant.errors import ConversionError
from miles.quant.scope import Ignore, Scope, decoder_layer_count, edge_layers_ignore, is_routed_expert_weight

LISTED = 100
_EXPERTS = re.compile(r"((?:.*?\.)?experts)\.")


def producer(kind: str) -> dict[str, str]:
    """Who made a checkpoint: the conversion and the versions whose arithmetic it used."""
    versions = {"conversion": kind}
    for package in ("miles-rl", "torch", "safetensors"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def keep(source: Source, names: Iterable[str]) -> list[Item]:
    """Items that copy tensors unchanged into their own shard."""
    return [Item(source.tensors[n].shard, (source.tensors[n].spec,)) for n in names]


def refuse(source: Source, faults: Sequence[str]) -> None:
    """ConversionError that lists the faults (the first hundred), if there are any."""
    if faults:
        more = f"\n  ... {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        raise ConversionError(f"{source.directory} cannot be converted:\n  " + "\n  ".join(faults[:LISTED]) + more)


def ignore_of(source: Source, entries: Sequence[str]) -> Ignore:
    """The `--ignore` options; ConversionError names a bad one, or one that matches no tensor."""
    try:
        ignore = Ignore(tuple(entries))
    except ValueError as error:
        raise ConversionError(f"--ignore: {error}") from None
    if unused := ignore.unused(source.tensors):
        raise ConversionError(
            f"--ignore {unused[0]}: no tensor of {source.directory} matches; give a tensor's name, a prefix ending in a dot, "
            "or re:PATTERN for the whole name"
        )
    return ignore


def scope_of(source: Source, ignore: Sequence[str], first: int, last: int) -> Scope:
    """The user's ignore list plus the first and last bf16 decoder layers."""
    entries = ignore_of(source, ignore).entries
    if first or last:
        try:
            edges = edge_layers_ignore(source.tensors, decoder_layer_count(source.config), first, last)
        except ValueError as error:
            raise ConversionError(f"--bf16-first-layers and --bf16-last-layers: {error}") from None
        entries = (*entries, *edges.entries)
    return Scope(Ignore(entries))


def compact_excludes(kept: Iterable[str], quantised: Iterable[str]) -> list[str]:
    """Modules with a kept tensor and no quantised one, by their full names; experts that are all kept are one module.

    The form that every reader takes (decision 0405): some compare whole names, others prefixes that end at a dot.

    >>> compact_excludes(["a.attn.q.weight", "a.norm.weight", "b.experts.0.w1.weight"], ["a.experts.0.w1.weight"])
    ['a.attn.q', 'a.norm', 'b.experts']
    """
    inside: set[str] = set()
    for name in quantised:
        parts = name.split(".")
        inside.update(".".join(parts[:i]) for i in range(1, len(parts) + 1))
    modules = set()
    for name in kept:
        # A packed tensor of all experts is its own module: what stands beside it may be quantised.
        packed = is_routed_expert_weight(name) and not name.endswith(".weight")
        module = name if packed else name.rpartition(".")[0] or name
        container = _EXPERTS.match(name)
        if container and container[1] not in inside:
            modules.add(container[1])
        elif module not in inside:
            modules.add(module)
    return sorted(modules)

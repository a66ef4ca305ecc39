"""Pieces that every conversion's plan uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from miles.quant.convert.run import Item
from miles.quant.convert.shards import Source
from miles.quant.errors import ConversionError
from miles.quant.scope import Ignore, Scope, decoder_layer_count, edge_layers_ignore

LISTED = 100


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
    """Shortest prefixes (ending in a dot) that cover every kept tensor and no quantised one.

    >>> compact_excludes(["a.attn.q.weight", "a.attn.k.weight", "a.norm.weight"], ["a.mlp.experts.0.up_proj.weight"])
    ['a.attn.', 'a.norm.']
    """
    inside: set[str] = set()
    for name in quantised:
        parts = name.split(".")
        inside.update(".".join(parts[:i]) + "." for i in range(1, len(parts)))
    prefixes = set()
    for name in kept:
        parts = name.split(".")
        prefix = next((p for i in range(1, len(parts)) if (p := ".".join(parts[:i]) + ".") not in inside), None)
        prefixes.add(prefix or name)
    return sorted(prefixes)

"""Pieces that every conversion's plan uses."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from miles.quant.convert.run import Item
from miles.quant.convert.shards import Source
from miles.quant.errors import ConversionError


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


def decoder_layers(config: dict) -> int:
    """`num_hidden_layers` of the text model; MTP layers are not counted."""
    count = config.get("num_hidden_layers", config.get("text_config", {}).get("num_hidden_layers"))
    if not isinstance(count, int):
        raise ConversionError("config.json has no num_hidden_layers, which first and last bf16 layers need")
    return count


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

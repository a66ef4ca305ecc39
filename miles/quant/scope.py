"""Which tensors are quantised: one predicate for converter, live export and fake QAT, and the ignore list.

Order: the shared-expert veto first, then the routed-expert match. Names are Hugging Face checkpoint names or
megatron-core parameter names, with any prefix in front.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.quant.patterns import compile_bounded

_SHARED = re.compile(r"(^|\.)(shared_experts?|shared_expert_gate)(\.|$)")
_HALVES = r"(?:gate|up|down)_proj|gate_up_proj"
_ROUTED = re.compile(
    r"(^|\.)(?:"
    rf"experts\.\d+\.(?:{_HALVES})\.weight"
    r"|experts\.\d+\.w[123]\.weight"
    r"|block_sparse_moe\.experts\.\d+\.(?:w[123]|gate_proj|up_proj|down_proj)\.weight"
    r"|experts\.(?:gate_up_proj|down_proj)(?:\.weight)?"
    r"|mlp\.experts\.linear_fc[12]\.weight\d+"
    r"|mlp\.experts\.local_experts\.\d+\.linear_fc[12]\.weight"
    r")$"
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MTP = re.compile(r"(^|\.)mtp(\.|_)")
_PAIR = re.compile(r"^(.*\.)(gate_proj|up_proj|w1|w3)(\.weight)$")
_PARTNER = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}


def is_shared_expert(name: str) -> bool:
    """True for anything that belongs to a shared expert or its gate."""
    return _SHARED.search(name) is not None


def is_routed_expert_weight(name: str) -> bool:
    """True for the weight matrix of a routed expert, in any supported naming.

    >>> is_routed_expert_weight("model.layers.3.mlp.experts.17.gate_proj.weight")
    True
    >>> is_routed_expert_weight("model.layers.3.mlp.shared_experts.gate_proj.weight")
    False
    """
    return not is_shared_expert(name) and _ROUTED.search(name) is not None


def gate_up_partner(name: str) -> str | None:
    """The other half of a gate/up pair, which shares its tensor scale; None for other weights.

    >>> gate_up_partner("model.layers.0.mlp.experts.2.w3.weight")
    'model.layers.0.mlp.experts.2.w1.weight'
    """
    match = _PAIR.match(name)
    return f"{match[1]}{_PARTNER[match[2]]}{match[3]}" if match else None


@dataclass(frozen=True)
class Ignore:
    """Names that stay in bf16: exact names, prefixes (ending in a dot), or `re:` patterns.

    >>> Ignore(("model.layers.0.", "re:.*down_proj.*")).matches("model.layers.0.mlp.experts.1.up_proj.weight")
    True
    """

    entries: tuple[str, ...] = ()
    _patterns: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        patterns = []
        for entry in self.entries:
            if not entry or entry == "re:":
                raise ValueError(f"ignore entry {entry!r} is empty: it would match everything or nothing")
            if entry.startswith("re:"):
                try:
                    patterns.append(compile_bounded(entry[3:]))
                except (re.error, RecursionError, OverflowError) as error:
                    raise ValueError(f"ignore entry {entry[:250]!r} is no regular expression: {error}") from error
                except ValueError as error:
                    raise ValueError(f"ignore entry {entry[:250]!r} {error}") from error
        object.__setattr__(self, "_patterns", tuple(patterns))

    def matches(self, name: str) -> bool:
        for entry in self.entries:
            if not entry.startswith("re:") and (name == entry or (entry.endswith(".") and name.startswith(entry))):
                return True
        return any(p.fullmatch(name) for p in self._patterns)

    def unused(self, names: Iterable[str]) -> list[str]:
        """Entries that match none of `names`: misspelt, or a prefix without its dot."""
        known = list(names)
        return [entry for entry in self.entries if not any(Ignore((entry,)).matches(name) for name in known)]

    def compact(self) -> tuple[str, ...]:
        """Entries without those that another prefix covers, sorted: what a contract stores, never leaves."""
        prefixes = [e for e in self.entries if e.endswith(".") and not e.startswith("re:")]
        kept = {e for e in self.entries if e.startswith("re:") or not any(e != p and e.startswith(p) for p in prefixes)}
        return tuple(sorted(kept))


def decoder_layer(name: str, num_layers: int) -> int | None:
    """Decoder layer index of a name; None outside the decoder and for MTP layers (own names, or index >= num_layers)."""
    match = _LAYER.search(name)
    if match is None or _MTP.search(name) or int(match[1]) >= num_layers:
        return None
    return int(match[1])


def decoder_layer_count(config: Mapping[str, Any]) -> int:
    """`num_hidden_layers` of the text model in a config.json; MTP layers are not counted."""
    text = config.get("text_config")
    count = config.get("num_hidden_layers", text.get("num_hidden_layers") if isinstance(text, dict) else None)
    if not isinstance(count, int):
        raise ValueError("config.json has no num_hidden_layers, which first and last bf16 layers need")
    return count


def edge_layers_ignore(names: Iterable[str], num_layers: int, first: int, last: int) -> Ignore:
    """First and last bf16 layers as prefixes of `names`. Decoder layers only: `num_layers` does not count MTP layers."""
    if first < 0 or last < 0 or first + last > num_layers:
        raise ValueError(f"first={first} and last={last} bf16 layers do not fit in {num_layers} decoder layers")
    prefixes = set()
    for name in names:
        layer = decoder_layer(name, num_layers)
        if layer is not None and not first <= layer < num_layers - last:
            match = _LAYER.search(name)
            assert match is not None
            prefixes.add(name[: match.end()])
    return Ignore(tuple(sorted(prefixes)))


@dataclass(frozen=True)
class Scope:
    """The predicate and the exceptions together: what a run quantises."""

    ignore: Ignore = Ignore()

    def __contains__(self, name: str) -> bool:
        return is_routed_expert_weight(name) and not self.ignore.matches(name)

    def select(self, names: Iterable[str]) -> list[str]:
        return [n for n in names if n in self]


def check_pairs(names: Sequence[str]) -> None:
    """Every gate has its up, once; raises ValueError with the missing or duplicated half."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    duplicated = sorted(n for n, count in seen.items() if count > 1 and gate_up_partner(n))
    if duplicated:
        raise ValueError(f"gate/up half appears more than once: {', '.join(duplicated[:5])}")
    missing = sorted(p for n in seen if (p := gate_up_partner(n)) and p not in seen)
    if missing:
        raise ValueError(f"gate/up half is missing: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}")

"""What a conversion would keep although it is quantised: kept as it is, it would contradict the result's config.json."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from miles.quant.convert.layouts import layout_of
from miles.quant.convert.shards import Source
from miles.quant.headers import QUANTISED, scaled_weight
from miles.quant.scope import is_shared_expert

PACKED = (*QUANTISED, "F8_E8M0")


def quantised_left(source: Source, kept: Iterable[str], *, reads: str, written: Collection[str] = ()) -> list[str]:
    """A fault for each quantised tensor and each stray scale among `kept`; `reads` says what the conversion reads.

    A scale whose weight is quantised is not listed beside it; one whose weight is elsewhere is copied, unless it is a
    shared expert's, which no reader of ours accepts. `written`: names that the conversion gives anew.
    """
    faults = []
    for name in kept:
        spec = source.tensors[name].spec
        owner = scaled_weight(name)
        packed_owner = owner in source.tensors and source.tensors[owner].spec.dtype in PACKED
        if name in written or packed_owner:
            continue
        if spec.dtype in PACKED:
            layout = layout_of(source, name)
            known = f", in the layout {layout}," if layout else ""
            faults.append(f"{name}: {spec.dtype} {list(spec.shape)}{known} is quantised and would be kept so; {reads}")
        elif owner is not None and (owner in source.tensors or is_shared_expert(owner)):
            faults.append(f"{name}: scale of a weight that is not quantised; remove the stray scale")
    return faults

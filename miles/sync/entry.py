"""One piece of a weight sync: which slice of a trained array goes where in an engine, and in which form."""

from __future__ import annotations

from dataclasses import dataclass

from miles.weight_wire.bucket import Slot

# Parts of a quantised weight; one that is not quantised has values only.
VALUES, SCALE, SCALE_2 = "values", "scale", "scale_2"


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A trained array as the trainer will offer it: full (unsharded) shape and wire dtype."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One piece: `slice` of the source goes to `slot` of `dest` (None: all of it), as `shape` of `dtype`.

    Pieces with the same `atomic_group` travel in one bucket round. `scale` is what the destination announces. For a
    quantised weight `codec` is its scale format, `part` which of the codec's arrays this piece is, and `values_dtype`
    how the values are stored; `slice` is then one of that array.
    """

    hf_name: str
    source: SourceSpec
    dest: str
    slice: Slot | None
    slot: Slot | None
    shape: tuple[int, ...]
    dtype: str
    scale: str
    nbytes: int
    atomic_group: str
    layout_key: str
    module: str
    codec: str = "none"
    part: str = VALUES
    values_dtype: str = ""

    def canonical(self) -> list[object]:
        return [
            self.hf_name, self.source.shape, self.source.dtype, self.dest, self.slice, self.slot, self.shape,
            self.dtype, self.scale, self.nbytes, self.atomic_group, self.layout_key, self.module,
            self.codec, self.part, self.values_dtype,
        ]  # fmt: skip

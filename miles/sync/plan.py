"""The plan of a weight sync: which trained array goes where, in which format, on every engine layout.

Pure: from the trainer's weight map and the engines' own tables to one ordered list per layout. The destination's
dtype and scale decide the format, never a model flag. No tensors, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from miles.sync.checksum import plan_digest
from miles.sync.entry import PlanEntry, SourceSpec
from miles.sync.errors import PlanError
from miles.sync.formats import atomic_group, check_cuts, stored_form, targets_of
from miles.weight_wire.bucket import DTYPES, Slot, WeightWireError
from miles.weight_wire.table import EngineTable, ParamEntry, parts_of

Selector = str | tuple[str, ...]
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class SyncPlan:
    """`layouts`: layout key -> entries in sending order. `selectors`: layout key -> what every message carries."""

    run_id: str
    layouts: Mapping[str, tuple[PlanEntry, ...]]
    selectors: Mapping[str, Selector]

    @cached_property
    def digest(self) -> str:
        """sha256 over the run id and all entries; agreed with each engine at begin."""
        return plan_digest(self.run_id, [(key, [e.canonical() for e in es]) for key, es in self.layouts.items()])

    @cached_property
    def by_source(self) -> dict[str, tuple[PlanEntry, ...]]:
        """Hugging Face name -> its entries over all layouts."""
        found: dict[str, list[PlanEntry]] = {}
        for entries in self.layouts.values():
            for entry in entries:
                found.setdefault(entry.hf_name, []).append(entry)
        return {name: tuple(entries) for name, entries in found.items()}

    @cached_property
    def positions(self) -> dict[PlanEntry, int]:
        """Where in its layout each piece stands."""
        return {entry: number for entries in self.layouts.values() for number, entry in enumerate(entries)}

    @cached_property
    def group_sizes(self) -> dict[tuple[str, str], int]:
        """(layout key, atomic group) -> number of pieces that must be ready before any of them is packed."""
        sizes: dict[tuple[str, str], int] = {}
        for entries in self.layouts.values():
            for entry in entries:
                key = (entry.layout_key, entry.atomic_group)
                sizes[key] = sizes.get(key, 0) + 1
        return sizes


def build_plan(weight_map: Mapping[str, SourceSpec], tables: Iterable[EngineTable], *, run_id: str) -> SyncPlan:
    """Match every trained name with exactly one destination (or fused slot) per layout.

    `PlanError` lists all unknown names, all unfilled destinations of covered modules, all names with two
    destinations and all shapes that do not fit.
    """
    distinct = {table.layout_key: table for table in tables}
    if not distinct or not weight_map:
        raise PlanError("a weight sync needs at least one engine table and one trained weight")
    problems = _unknown_names(weight_map, list(distinct.values()))
    layouts: dict[str, tuple[PlanEntry, ...]] = {}
    selectors: dict[str, Selector] = {}
    for key, table in distinct.items():
        entries, faults = _layout_entries(weight_map, table)
        problems += faults
        covered = covered_modules(entries, table)
        problems += _unfilled(entries, covered, table)
        layouts[key] = tuple(sorted(entries, key=_order))
        selectors[key] = selector_for(covered, table)
    if problems:
        raise PlanError("weights and engine tables do not fit:\n  " + "\n  ".join(problems))
    return SyncPlan(run_id, layouts, selectors)


def covered_modules(entries: Iterable[PlanEntry], table: EngineTable) -> frozenset[str]:
    """Modules that own at least one planned destination by storage: an alias covers nothing."""
    return frozenset(
        table.by_name[e.dest].module
        for e in entries
        if e.dest in table.by_name and table.by_name[e.dest].filled_by_sync
    )


def selector_for(covered: frozenset[str], table: EngineTable) -> Selector:
    """ "all" when every module with storage of its own is covered, else the sorted list of covered modules."""
    owning = {entry.module for entry in table.entries if entry.filled_by_sync}
    return "all" if covered == owning else tuple(sorted(covered))


def _layout_entries(weight_map: Mapping[str, SourceSpec], table: EngineTable) -> tuple[list[PlanEntry], list[str]]:
    entries: list[PlanEntry] = []
    faults: list[str] = []
    taken: dict[str, str] = {}
    for destination in table.entries:
        names = destination.fused_from or (destination.name,)
        present = [name for name in names if name in weight_map]
        if not present:
            continue
        if destination.alias_of is not None:
            faults.append(
                f"{destination.name} shares its storage with {destination.alias_of} on the engine: offer tied weights once"
            )
            continue
        if destination.recomputed:
            faults.append(f"{destination.name} is recomputed by the engine: do not offer it")
            continue
        for name in present:
            if taken.setdefault(name, destination.name) != destination.name:
                faults.append(f"{name} has two destinations: {taken[name]} and {destination.name}")
        if len(present) < len(names):
            missing = ", ".join(name for name in names if name not in weight_map)
            faults.append(f"{destination.name} waits for pieces nobody sends: {missing}")
            continue
        try:
            entries += _pieces(destination, names, weight_map, table)
        except (PlanError, WeightWireError) as error:
            faults.append(str(error))
    return entries, faults


def _pieces(
    destination: ParamEntry, names: Sequence[str], weight_map: Mapping[str, SourceSpec], table: EngineTable
) -> list[PlanEntry]:
    """All pieces of one destination, and of its scales when it is quantised."""
    shapes = {name: weight_map[name].shape for name in names}
    check_cuts(destination, list(shapes.values()), table.tp)
    forms = {name: stored_form(destination, name, shape) for name, shape in shapes.items()}
    entries: list[PlanEntry] = []
    for kind, target in targets_of(destination, table).items():
        expected = forms[names[0]][kind][1]
        if target.dtype != expected:
            raise PlanError(f"{target.name} holds {target.dtype}, {destination.scale} stores its {kind} as {expected}")
        for part in parts_of(target, {name: forms[name][kind][0] for name in names}, table):
            entries.append(
                PlanEntry(
                    hf_name=part.hf_name,
                    source=weight_map[part.hf_name],
                    dest=target.name,
                    slice=part.slice,
                    slot=part.slot,
                    shape=part.shape,
                    dtype=target.dtype,
                    scale=target.scale,
                    nbytes=_nbytes(part.shape, target.dtype),
                    atomic_group=atomic_group(destination, part.hf_name),
                    layout_key=table.layout_key,
                    module=destination.module,
                    codec=destination.scale,
                    part=kind,
                    values_dtype=destination.dtype,
                )
            )
    return entries


def _unknown_names(weight_map: Mapping[str, SourceSpec], tables: Sequence[EngineTable]) -> list[str]:
    """Names without a destination. Ranks of a pipeline or expert layout are looked at together."""
    layouts: dict[tuple[object, ...], set[str]] = {}
    for table in tables:
        key: tuple[object, ...] = (table.tp, table.ep, table.pp, table.build)
        if table.ep == table.pp == 1:
            key = (*key, table.layout_key)
        names = layouts.setdefault(key, set())
        for entry in table.entries:
            names.update(entry.fused_from or (entry.name,))
    unknown = sorted({name for known in layouts.values() for name in weight_map if name not in known})
    return [f"{name} has no destination on the engine" for name in unknown]


def _unfilled(entries: Sequence[PlanEntry], covered: frozenset[str], table: EngineTable) -> list[str]:
    filled = {entry.dest for entry in entries}
    return [
        f"{e.name} (module {e.module}) receives nothing"
        for e in table.entries
        if e.filled_by_sync and e.module in covered and e.name not in filled
    ]


def _order(entry: PlanEntry) -> tuple[int, str, Slot]:
    layer = _LAYER.search(entry.dest)
    return (int(layer.group(1)) if layer else -1, entry.atomic_group, entry.slot or ())


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel * DTYPES[dtype].itemsize

"""Split one test file over several shards by its items, so that no item runs twice or not at all.

Items that belong together stay together: those of a class, and those of one `xdist_group` (whose node ids
end in `@group`). Parts 2..m name their items; part 1 deselects exactly those and runs everything else, so
an item that nobody knew when the plan was made still runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIN_KNOWN = 0.9


@dataclass(frozen=True, slots=True)
class Part:
    """`index` counts from 1. Part 1 has `deselect` and no `nodes`, the others have `nodes`."""

    index: int
    ms: int
    nodes: tuple[str, ...] | None
    deselect: tuple[str, ...] = ()


def group_of(node_id: str) -> str:
    """What an item is kept together with: its xdist group, its class, or nothing but itself."""
    _, at, group = node_id.rpartition("@")
    if at and group and "[" not in group and "]" not in group:
        return f"@{group}"
    parts = node_id.split("::")
    return f"::{parts[1]}" if len(parts) > 2 else node_id


def groups_of(items: Mapping[str, int | None]) -> dict[str, list[str]]:
    """Items by group, sorted."""
    groups: dict[str, list[str]] = {}
    for node in sorted(items):
        groups.setdefault(group_of(node), []).append(node)
    return groups


def splittable(items: Mapping[str, int | None]) -> bool:
    """Whether durations are known for at least 90 % of the items and there are two groups to part."""
    if not items:
        return False
    known = sum(value is not None for value in items.values())
    return known >= MIN_KNOWN * len(items) and len(groups_of(items)) > 1


def split(items: Mapping[str, int | None], parts: int) -> list[Part]:
    """Divide the items over `parts` parts (fewer when there are fewer groups), longest group first."""
    groups = groups_of(items)
    known = [value for value in items.values() if value is not None]
    fallback = max(1, sum(known) // len(known)) if known else 1
    sizes = {
        name: sum(fallback if items[node] is None else items[node] or 0 for node in nodes)
        for name, nodes in groups.items()
    }
    count = max(1, min(parts, len(groups)))
    contents: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for position, name in enumerate(sorted(groups, key=lambda name: (-sizes[name], name))):
        # The first `count` groups open the parts, so that zero-length groups leave none empty.
        target = position if position < count else min(range(count), key=lambda index: (loads[index], index))
        contents[target].extend(groups[name])
        loads[target] += sizes[name]
    elsewhere = tuple(sorted(_selector(node) for nodes in contents[1:] for node in nodes))
    result = [Part(1, max(1, loads[0]), None, elsewhere)]
    for index in range(1, count):
        nodes = tuple(sorted(_selector(node) for node in contents[index]))
        result.append(Part(index + 1, max(1, loads[index]), nodes))
    return result


def _selector(node_id: str) -> str:
    """The id that pytest's command line takes: xdist's `@group` ending is not part of it."""
    group = group_of(node_id)
    return node_id[: -len(group)] if group.startswith("@") else node_id

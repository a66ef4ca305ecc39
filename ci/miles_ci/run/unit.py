"""What the runner is asked to run, free of where it came from (a plan, a single file, a benchmark)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from miles_ci.plan.slots import start_key

MIN_TIMEOUT_S = 300.0
TIMEOUT_FACTOR = 3.0


@dataclass(frozen=True)
class RunUnit:
    """One planned unit: a test file, or a part of one.

    `nodes`: run only these node ids (parts 2..m of a split); `deselect`: run everything but these (part 1).
    `timeout_s` is already capped by the suite. `allow_all_skipped` and `unstable` hold the declared reason.
    `declaration_error` makes the unit a failed entry that starts no process. `gates` are gate declarations
    (see `miles_ci.history.gate.GateSpec`). `narrowed`: the caller asked for `nodes` only, so this is not the planned unit.
    """

    id: str
    path: str
    est_s: float
    timeout_s: float
    num_gpus: int = 0
    min_memory_gib: float | None = None
    serial: bool = False
    allow_all_skipped: str | None = None
    unstable: str | None = None
    nodes: tuple[str, ...] = ()
    deselect: tuple[str, ...] = ()
    declaration_error: str | None = None
    gates: tuple[Any, ...] = field(default=(), hash=False)
    narrowed: bool = False

    @property
    def ms(self) -> int:
        return round(self.est_s * 1000)

    @property
    def devices(self) -> int:
        return self.num_gpus

    @property
    def only(self) -> tuple[str, ...]:
        """The nodes to which `--file` narrowed it; empty for the whole planned unit."""
        return self.nodes if self.narrowed else ()

    def targets(self) -> list[str]:
        """Arguments that make pytest run this unit and nothing else."""
        if self.nodes:
            return list(self.nodes)
        return [self.path, *(word for node in self.deselect for word in ("--deselect", node))]


def start_order(units: Iterable[RunUnit]) -> list[RunUnit]:
    """The order in which the planner expects them to start."""
    return sorted(units, key=start_key)


def slug(name: str) -> str:
    """A file name for a unit id: readable, short, and different for different ids."""
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[-120:]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"

"""Concurrency groups: one run at a time, what happens to the ones that wait.

`single` (GitHub's default) keeps one waiting run and cancels the one it replaces; `max` keeps up to 100 in
order. Group names compare without case. `queue: max` together with cancel-in-progress is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from miles_ci.workflows.model import WorkflowError

MAX_WAITING = 100


@dataclass
class Group:
    running: str | None = None
    waiting: list[str] = field(default_factory=list)


@dataclass
class Concurrency:
    """State of all groups; `submit` and `finish` return the runs cancelled or started by the call."""

    groups: dict[str, Group] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)

    def submit(self, group: str, run: str, *, queue: str = "single", cancel_in_progress: bool = False) -> list[str]:
        """Add a run; returns the runs that this cancels."""
        if queue not in ("single", "max"):
            raise WorkflowError(f"concurrency.queue {queue!r}: single or max")
        if queue == "max" and cancel_in_progress:
            raise WorkflowError("concurrency.queue max cannot be combined with cancel-in-progress")
        state = self.groups.setdefault(group.lower(), Group())
        dropped: list[str] = []
        if state.running is None:
            state.running = run
            return dropped
        if cancel_in_progress:
            dropped = [*state.waiting, state.running]
            state.waiting, state.running = [], run
        elif queue == "single":
            dropped, state.waiting = state.waiting, [run]
        elif len(state.waiting) >= MAX_WAITING:
            dropped = [run]
        else:
            state.waiting.append(run)
        self.cancelled.extend(dropped)
        return dropped

    def finish(self, group: str) -> str | None:
        """The running one ends; returns the run that starts."""
        state = self.groups[group.lower()]
        state.running = state.waiting.pop(0) if state.waiting else None
        return state.running

"""`WeightState`: what the engine's weights are now, and every way in which that may change.

Phases: `serving` (the parameters are version v, whole), `updating` (an update writes them), `dirty` (they are no
version: refused until a whole update), `released` (they are not in memory). The routes that generate, update weights
and release memory all ask this one object; none of them moves what another relies on. A change that the table does
not list is refused with the phase and what is possible in it, and changes nothing.

The scheduler computes in phase `serving` only. `begin`, `finish` and the memory events are called on its thread, so
that no forward pass runs while parameters are written or away.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from miles.config import MilesError

SERVING, UPDATING, DIRTY, RELEASED = "serving", "updating", "dirty", "released"

_STAYS: Mapping[str, str] = {SERVING: SERVING, DIRTY: DIRTY, RELEASED: RELEASED}
# event -> {phase in which it may happen: phase after it}
TRANSITIONS: Mapping[str, Mapping[str, str]] = {
    "begin": {SERVING: UPDATING, DIRTY: UPDATING},
    "finish": {UPDATING: SERVING},
    "fail": {UPDATING: DIRTY},
    "release_weights": {SERVING: RELEASED, DIRTY: RELEASED, RELEASED: RELEASED},
    # Weights come back empty: only a whole update makes a version of them.
    "resume_weights": {RELEASED: DIRTY, SERVING: SERVING, DIRTY: DIRTY},
    "release_cache": _STAYS,
    "resume_cache": _STAYS,
    "change_group": _STAYS,
    "read_weights": {SERVING: SERVING, DIRTY: DIRTY, UPDATING: UPDATING},
}


class WeightUpdateError(MilesError):
    """A refused weight update. `code` is stable; `fatal`: it ended the session and made the engine dirty."""

    def __init__(self, code: str, message: str, *, fatal: bool = True, retry_after_s: float | None = None):
        super().__init__(message)
        self.code = code
        self.fatal = fatal
        self.retry_after_s = retry_after_s


class IllegalTransition(WeightUpdateError):
    """The event is not possible in this phase; nothing changed."""

    def __init__(self, event: str, phase: str, *, message: str = "", retry_after_s: float | None = None):
        self.phase = phase
        self.allowed = allowed_in(phase)
        text = message or f"{event} is not possible while the weights are {phase}"
        code = "busy" if (event, phase) == ("begin", UPDATING) else "illegal_transition"
        super().__init__(
            code, f"{text}; possible now: {', '.join(self.allowed)}", fatal=False, retry_after_s=retry_after_s
        )


def allowed_in(phase: str) -> tuple[str, ...]:
    """The events that the table lists for a phase."""
    return tuple(event for event, moves in TRANSITIONS.items() if phase in moves)


@dataclass(frozen=True, slots=True)
class BeginUpdate:
    """What a trainer announces. `selector` is "all" or the exact list of covered modules; `timeout_s`: its silence."""

    run_id: str
    version: int
    selector: str | tuple[str, ...]
    plan_digest: str
    table_digest: str
    engine_epoch: str
    pause: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class UpdateSession:
    """The update in progress. `client`: the connection it belongs to, None when that is not known."""

    token: str
    begin: BeginUpdate
    deadline: float
    client: Hashable = None


@dataclass(frozen=True, slots=True)
class WeightView:
    """One consistent look. (`run_id`, `version`): the last update that was finished, never one only begun.

    `intact`: the parameters hold that version, or did when the update in progress began.
    """

    phase: str
    version: int
    run_id: str | None = None
    plan_digest: str | None = None
    reason: str = ""
    intact: bool = True
    cache_held: bool = True
    session: UpdateSession | None = None

    @property
    def refusal(self) -> tuple[str, str] | None:
        """(kind, text) of the 503 that a request gets now, or None when requests are served."""
        if self.phase == SERVING:
            return None
        if self.phase == UPDATING:
            return "weights_updating", f"a weight update is in progress; last complete version {self.version}"
        if self.phase == RELEASED:
            return "weights_released", "the weights are released from memory; resume them, then sync"
        return "weights_dirty", f"{self.reason}; complete a whole weight sync first"


class WeightState:
    """Thread-safe. `listener` is called after every change, outside the lock. `epoch` names this life of the engine."""

    def __init__(self, version: int = 0) -> None:
        self.epoch = secrets.token_hex(8)
        self.listener: Callable[[], None] = lambda: None
        self._view = WeightView(SERVING, version)
        self._lock = threading.RLock()

    def get(self) -> WeightView:
        return self._view

    @property
    def session(self) -> UpdateSession | None:
        return self._view.session

    def require(self, event: str, now: float | None = None) -> None:
        """`IllegalTransition` unless `event` may happen now."""
        view = self._view
        if view.phase in TRANSITIONS[event]:
            return
        session = view.session
        if session is None:
            raise IllegalTransition(event, view.phase)
        left = None if now is None else max(0.0, session.deadline - now)
        message = f"{event} is not possible while the weights are updating: an update to version "
        message += f"{session.begin.version} is in progress"
        raise IllegalTransition(event, view.phase, message=message, retry_after_s=left)

    def check_begin(self, begin: BeginUpdate, now: float) -> None:
        """Refusals of a new update; none changes anything. A version of the same run only rises."""
        self.require("begin", now)
        view = self._view
        if begin.engine_epoch != self.epoch:
            raise WeightUpdateError("table_changed", "the engine restarted: read /parameter_table again", fatal=False)
        if begin.run_id == view.run_id and begin.version <= view.version:
            raise WeightUpdateError(
                "version_going_back",
                f"weight version {begin.version} of run {begin.run_id} is not above {view.version}",
                fatal=False,
            )

    def begin(self, begin: BeginUpdate, now: float, *, client: Hashable = None) -> UpdateSession:
        """serving | dirty -> updating."""
        with self._lock:
            self.check_begin(begin, now)
            session = UpdateSession(secrets.token_hex(8), begin, now + begin.timeout_s, client)
            self._move("begin", session=session, reason="")
            return session

    def heard(self, token: str, now: float) -> None:
        """A message of the session arrived whole: its silence starts anew."""
        with self._lock:
            session = self.require_session(token)
            self._view = replace(self._view, session=replace(session, deadline=now + session.begin.timeout_s))

    def require_session(self, token: str) -> UpdateSession:
        """The update in progress if the token is its own, else `no_session`; nothing changes."""
        session = self._view.session
        if session is None or not secrets.compare_digest(token.encode(), session.token.encode()):
            raise WeightUpdateError("no_session", "this weight update is not in progress on the engine", fatal=False)
        return session

    def finish(self, token: str) -> None:
        """updating -> serving(v'): every byte is in place, processed, and no older cache is left."""
        with self._lock:
            begin = self.require_session(token).begin
            self._move(
                "finish", session=None, version=begin.version, run_id=begin.run_id, plan_digest=begin.plan_digest,
                intact=True,
            )  # fmt: skip

    def fail(self, token: str, code: str, reason: str) -> None:
        """updating -> dirty. The last finished version stays reported; nothing is served."""
        with self._lock:
            self.require_session(token)
            self._move("fail", session=None, reason=f"{code}: {reason}", intact=False)

    def expire(self, now: float) -> bool:
        """Fail the session whose sender has been silent past its deadline."""
        with self._lock:
            session = self._view.session
            if session is None or now < session.deadline:
                return False
            begin = session.begin
            self.fail(
                session.token, "timeout", f"no message for {begin.timeout_s:g} s while updating to {begin.version}"
            )
            return True

    def weights_released(self) -> None:
        with self._lock:
            self._move("release_weights", reason="the weights were released from memory", intact=False)

    def weights_resumed(self) -> None:
        with self._lock:
            released = self._view.phase == RELEASED
            empty = {"reason": "the weights were released from memory and came back empty"} if released else {}
            self._move("resume_weights", **empty)

    def cache_released(self) -> None:
        with self._lock:
            self._move("release_cache", cache_held=False)

    def cache_resumed(self) -> None:
        with self._lock:
            self._move("resume_cache", cache_held=True)

    def status(self) -> dict[str, Any]:
        """What `/weight_status` says."""
        view = self._view
        return {
            "state": view.phase,
            "weight_version": str(view.version),
            "updating_to": None if view.session is None else str(view.session.begin.version),
            "run_id": view.run_id,
            "plan_digest": view.plan_digest,
            "engine_epoch": self.epoch,
            "reason": view.reason or None,
            "kv_cache": "held" if view.cache_held else "released",
            "allowed": list(allowed_in(view.phase)),
        }

    def _move(self, event: str, **changes: Any) -> None:
        self.require(event)
        after = TRANSITIONS[event][self._view.phase]
        self._view = replace(self._view, phase=after, **changes)
        self.listener()

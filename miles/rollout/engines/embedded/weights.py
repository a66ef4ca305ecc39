"""Weight updates inside the embedded engine: the state machine that decides what the engine may serve.

States: serving(v) -> updating(v') -> serving(v') | dirty. Every check that fails while updating makes the engine
dirty: it then refuses generation until one whole update succeeds. A version is reported only after every
destination of the covered modules was filled and post-processed and the caches were flushed.

This module is synchronous and knows no HTTP; `weight_routes` puts it behind the engine's routes, pauses the
scheduler around it and verifies the cache flush.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from miles.config import MilesError
from miles.weight_wire.bucket import BucketHeader, Piece, Slot, WeightWireError, digest, dtype_name, piece_view
from miles.weight_wire.table import EngineTable, ParamEntry, parts_of

SERVING, UPDATING, DIRTY = "serving", "updating", "dirty"
PAUSE_MODES = ("retract", "abort", "in_place")


class WeightUpdateError(MilesError):
    """A refused weight update. `code` is stable; `fatal` says whether it ends the session and dirties the engine."""

    def __init__(self, code: str, message: str, *, fatal: bool = True, retry_after_s: float | None = None):
        super().__init__(message)
        self.code = code
        self.fatal = fatal
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class BeginUpdate:
    """What a trainer announces. `selector` is "all" or the exact list of covered modules."""

    run_id: str
    version: int
    selector: str | tuple[str, ...]
    plan_digest: str
    table_digest: str
    engine_epoch: str
    pause: str
    timeout_s: float


@dataclass(slots=True)
class _Session:
    token: str
    begin: BeginUpdate
    covered: frozenset[str]
    waiting: dict[str, int]
    deadline: float
    received: set[tuple[str, Slot | None]] = field(default_factory=set)
    sequence: int = 0
    module_bytes: dict[str, int] = field(default_factory=dict)


def table_of(
    parameters: Mapping[str, torch.Tensor],
    *,
    aliases: Mapping[str, str] | None = None,
    fused: Mapping[str, tuple[str, ...]] | None = None,
    modules: Mapping[str, str] | None = None,
    build: str = "embedded",
) -> EngineTable:
    """The table of an unquantised, unsharded engine.

    `aliases` maps a name to the parameter whose storage it shares; `fused` a destination to the Hugging Face names
    stacked along its dimension 0; `modules` a parameter to its module ("target" where absent).
    """
    fused, modules = fused or {}, modules or {}
    entries = [
        ParamEntry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            module=modules.get(name, "target"),
            fused_from=tuple(fused.get(name, ())),
            num_shards=len(fused.get(name, ())) or 1,
        )
        for name, tensor in parameters.items()
    ]
    for name, owner in (aliases or {}).items():
        tensor = parameters[owner]
        entries.append(ParamEntry(name, tuple(tensor.shape), dtype_name(tensor.dtype), alias_of=owner))
    return EngineTable(entries=tuple(entries), build=build)


class WeightReceiver:
    """Owns what the engine may serve. Not thread-safe: the caller serialises its methods.

    `parameters` are the engine's live tensors, named as in `table`; they are written in place. `post_process`
    maps a module to the transform run exactly once per update that covers it, after its last byte.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        table: EngineTable,
        *,
        version: int = 0,
        post_process: Mapping[str, Callable[[], None]] | None = None,
    ):
        for entry in table.entries:
            tensor = parameters.get(entry.alias_of or entry.name)
            if tensor is None or tuple(tensor.shape) != entry.shape or dtype_name(tensor.dtype) != entry.dtype:
                raise WeightUpdateError("bad_table", f"engine table entry {entry.name} does not describe a parameter")
        self.table = table
        self.epoch = secrets.token_hex(8)
        self.state = SERVING
        self.version = version
        self.run_id: str | None = None
        self.plan_digest: str | None = None
        self.dirty_reason: str | None = None
        # False from the first failure until an update is whole again: the parameters are no version at all.
        self.intact = True
        self.stamps: dict[str, tuple[int, int]] = {}
        self._parameters = parameters
        self._post_process = dict(post_process or {})
        self._session: _Session | None = None

    @property
    def updating_to(self) -> int | None:
        return self._session.begin.version if self._session else None

    def refusal(self) -> str | None:
        """Why generation is refused (503 `weights_dirty`), or None while serving or updating."""
        return self.dirty_reason if self.state == DIRTY else None

    def status(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "weight_version": str(self.version),
            "updating_to": None if self._session is None else str(self._session.begin.version),
            "run_id": self.run_id,
            "plan_digest": self.plan_digest,
            "engine_epoch": self.epoch,
            "table_digest": self.table.table_digest,
            "reason": self.dirty_reason,
        }

    def digests(self) -> dict[str, str]:
        """Destination -> digest (hex) of the bytes it holds now, aliases left out."""
        names = [entry.name for entry in self.table.entries if entry.filled_by_sync]
        return {name: f"{digest(self._parameters[name]):#x}" for name in names}

    def check_begin(self, begin: BeginUpdate, now: float) -> None:
        """Refusals that leave the engine as it is: another session runs, or the trainer read another engine."""
        if self._session is not None:
            raise WeightUpdateError(
                "busy",
                f"an update to version {self.updating_to} is in progress; wait for its end or its timeout",
                fatal=False,
                retry_after_s=max(0.0, self._session.deadline - now),
            )
        if begin.engine_epoch != self.epoch or begin.table_digest != self.table.table_digest:
            raise WeightUpdateError(
                "table_changed", "the engine restarted or changed its table: read /parameter_table again", fatal=False
            )
        if begin.pause not in PAUSE_MODES or begin.timeout_s <= 0:
            raise WeightUpdateError("bad_request", f"pause must be one of {PAUSE_MODES}, timeout_s > 0", fatal=False)

    def begin(self, begin: BeginUpdate, now: float) -> str:
        """serving | dirty -> updating. Returns the session token that every later message of it carries."""
        self.check_begin(begin, now)
        if begin.run_id == self.run_id and begin.version <= self.version:
            message = f"weight version {begin.version} of run {begin.run_id} is not above {self.version}"
            self.abort("version_going_back", message)
            raise WeightUpdateError("version_going_back", message)
        modules = {entry.module for entry in self.table.entries if entry.filled_by_sync}
        covered = modules if begin.selector == "all" else set(begin.selector)
        if not covered or not covered <= modules:
            message = f"selector {begin.selector!r} names modules the engine lacks; it has {sorted(modules)}"
            self.abort("unknown_module", message)
            raise WeightUpdateError("unknown_module", message)
        waiting = {e.name: e.pieces for e in self.table.entries if e.filled_by_sync and e.module in covered}
        self._session = _Session(
            secrets.token_hex(8), begin, frozenset(covered), waiting, deadline=now + begin.timeout_s
        )
        self.state, self.dirty_reason = UPDATING, None
        return self._session.token

    def load(self, token: str, plan_digest: str, header: BucketHeader, buffer: torch.Tensor, now: float) -> int | None:
        """Verify one bucket, then copy its pieces into place. Returns the digest computed here (None: not asked).

        `buffer`: uint8 [>= header.nbytes]. Nothing is written unless the whole bucket passed its checks.
        """
        session = self._checked(token, plan_digest, header.version)
        if header.sequence != session.sequence:
            self._fatal("bad_sequence", f"bucket {header.sequence} arrived where {session.sequence} was due")
        if buffer.numel() < header.nbytes:
            self._fatal("short_bucket", f"bucket {header.sequence} has {buffer.numel()} of {header.nbytes} bytes")
        found = None
        if header.digest is not None:
            found = digest(buffer[: header.nbytes])
            if found != header.digest:
                self._fatal(
                    "digest_mismatch",
                    f"bucket {header.sequence} of version {header.version} has digest {found:#x}, "
                    f"announced {header.digest:#x} ({', '.join(p.name for p in header.pieces[:3])}, ...)",
                )
        targets = [self._target(session, piece, header) for piece in header.pieces]
        with torch.inference_mode():
            for piece, target in zip(header.pieces, targets, strict=True):
                target.copy_(piece_view(buffer, piece).view(target.shape))
                module = self.table.by_name[piece.name].module
                session.module_bytes[module] = session.module_bytes.get(module, 0) + piece.nbytes
        session.sequence += 1
        session.deadline = now + session.begin.timeout_s
        return found

    def load_named(
        self,
        token: str,
        plan_digest: str,
        version: int,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str, torch.Tensor], torch.Tensor],
        now: float,
    ) -> None:
        """Fill all covered parameters from whole Hugging Face tensors instead of buckets; counts as one bucket.

        `shapes`: every offered name; `read(name, current)` gives the tensor, `current` being what the engine holds of
        it now. Values are cast to the engine's dtype.
        """
        session = self._checked(token, plan_digest, version)
        unknown = set(shapes)
        with torch.inference_mode():
            for entry in self.table.entries:
                names = entry.fused_from or (entry.name,)
                if entry.name not in session.waiting or not all(name in shapes for name in names):
                    continue
                if entry.scale != "none":
                    self._fatal("format_mismatch", f"{entry.name} is quantised ({entry.scale}), the source is not")
                try:
                    parts = parts_of(entry, shapes, self.table)
                except WeightWireError as error:
                    self._fatal("shape_mismatch", str(error))
                for part in parts:
                    target = _narrow(self._parameters[entry.name].detach(), part.slot)
                    source = _narrow(read(part.hf_name, target.reshape(part.shape)), part.slice)
                    target.copy_(source.reshape(target.shape))
                    unknown.discard(part.hf_name)
                    session.waiting[entry.name] -= 1
                    moved = target.numel() * target.element_size()
                    session.module_bytes[entry.module] = session.module_bytes.get(entry.module, 0) + moved
        if unknown:
            self._fatal("unknown_name", f"version {version} offers unknown names: {', '.join(sorted(unknown)[:20])}")
        session.sequence += 1
        session.deadline = now + session.begin.timeout_s

    def complete(self, token: str, plan_digest: str, version: int, buckets: int) -> None:
        """All bytes are in: refuse what is missing, then post-process each covered module once."""
        session = self._checked(token, plan_digest, version)
        missing = sorted(name for name, count in session.waiting.items() if count)
        if buckets != session.sequence or missing:
            shown = ", ".join(missing[:20]) + (", ..." if len(missing) > 20 else "")
            self._fatal(
                "missing_pieces",
                f"version {version} ended after {session.sequence} of {buckets} buckets; waiting for "
                f"{len(missing)} parameters: {shown or '-'}",
            )
        for module in sorted(session.covered):
            stamp = (version, session.module_bytes.get(module, 0))
            if self.stamps.get(module) != stamp and module in self._post_process:
                self._post_process[module]()
            self.stamps[module] = stamp

    def finish(self, token: str) -> None:
        """updating -> serving(v'): called once the caches are verified empty."""
        session = self._require(token)
        self.version, self.run_id = session.begin.version, session.begin.run_id
        self.plan_digest = session.begin.plan_digest
        self.state, self.intact, self._session = SERVING, True, None

    def abort(self, code: str, reason: str) -> None:
        """Any state -> dirty. The last finished version stays reported; nothing is served."""
        self.state, self.intact, self._session = DIRTY, False, None
        self.dirty_reason = f"{code}: {reason}"

    def abort_session(self, token: str, reason: str) -> None:
        """The trainer gives up its own session."""
        self._require(token)
        self.abort("aborted", reason)

    def expire(self, now: float) -> bool:
        """Dirty the engine when the session's sender has been silent past its deadline."""
        if self._session is None or now < self._session.deadline:
            return False
        self.abort(
            "timeout", f"no message for {self._session.begin.timeout_s:g} s while updating to {self.updating_to}"
        )
        return True

    def seconds_left(self, now: float) -> float | None:
        return None if self._session is None else self._session.deadline - now

    def _target(self, session: _Session, piece: Piece, header: BucketHeader) -> torch.Tensor:
        """The storage a piece lands in, after every check against the engine's own table."""
        where = f"bucket {header.sequence} of version {header.version}, parameter {piece.name}"
        entry = self.table.by_name.get(piece.name)
        if entry is None or not entry.filled_by_sync:
            self._fatal("unknown_name", f"{where}: the engine has no such destination")
        if entry.module not in session.covered:
            self._fatal("not_covered", f"{where}: module {entry.module} is outside the selector")
        if (piece.dtype, piece.scale) != (entry.dtype, entry.scale):
            self._fatal(
                "format_mismatch",
                f"{where}: sent as {piece.dtype} scale {piece.scale}, the engine holds {entry.dtype} scale {entry.scale}",
            )
        if (piece.name, piece.slot) in session.received or session.waiting[piece.name] == 0:
            self._fatal("duplicate", f"{where}: sent twice in one update")
        target = self._parameters[piece.name].detach()
        if piece.slot is not None:
            target = self._slot_of(target, piece, where)
        if target.numel() != _numel(piece.shape) or (piece.slot is None and tuple(target.shape) != piece.shape):
            self._fatal("shape_mismatch", f"{where}: sent {list(piece.shape)}, the engine holds {list(target.shape)}")
        if piece.slot is None and entry.pieces != 1:
            self._fatal("shape_mismatch", f"{where}: a fused parameter needs a slot for each of {entry.pieces} pieces")
        session.received.add((piece.name, piece.slot))
        session.waiting[piece.name] -= 1
        return target

    def _slot_of(self, target: torch.Tensor, piece: Piece, where: str) -> torch.Tensor:
        slot = piece.slot or ()
        fits = len(slot) <= target.dim() and all(
            a < b <= size for (a, b), size in zip(slot, target.shape, strict=False)
        )
        if not fits:
            self._fatal("shape_mismatch", f"{where}: slot {slot} leaves the destination {list(target.shape)}")
        return _narrow(target, slot)

    def require_session(self, token: str) -> None:
        """`no_session` (engine unchanged) unless the token is that of the update in progress."""
        self._require(token)

    def announced_run(self, token: str) -> str:
        """Run id of the update in progress."""
        return self._require(token).begin.run_id

    def require_selector(self, token: str, selector: str | tuple[str, ...]) -> None:
        """The selector announced at begin goes unchanged through every message."""
        announced = self._require(token).begin.selector
        if selector != announced:
            self._fatal("selector_mismatch", f"selector {selector!r} inside an update begun with {announced!r}")

    def _require(self, token: str) -> _Session:
        if self._session is None or token != self._session.token:
            raise WeightUpdateError("no_session", "this weight update is not in progress on the engine", fatal=False)
        return self._session

    def _checked(self, token: str, plan_digest: str, version: int) -> _Session:
        session = self._require(token)
        if plan_digest != session.begin.plan_digest:
            self._fatal("plan_mismatch", f"plan digest {plan_digest} differs from {session.begin.plan_digest} at begin")
        if version != session.begin.version:
            self._fatal("version_mismatch", f"version {version} inside the update to {session.begin.version}")
        return session

    def _fatal(self, code: str, message: str) -> Any:
        self.abort(code, message)
        raise WeightUpdateError(code, message)


def _narrow(tensor: torch.Tensor, slot: Slot | None) -> torch.Tensor:
    for dim, (start, stop) in enumerate(slot or ()):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel

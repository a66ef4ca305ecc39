"""The receiving side of a weight update: checks every byte against the engine's own table and puts it in place.

Synchronous; knows no HTTP and no scheduler. What may happen when is `weight_state`'s: each failed check ends the
session there (the engine is dirty), and a message of another session changes nothing. A parameter is complete when
each of its elements has arrived exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NoReturn

import torch

from miles.rollout.engines.embedded.weight_coverage import Coverage
from miles.rollout.engines.embedded.weight_state import BeginUpdate, UpdateSession, WeightState, WeightUpdateError
from miles.weight_wire.bucket import BucketHeader, Piece, Slot, WeightWireError, digest, dtype_name, piece_view
from miles.weight_wire.table import EngineTable, ParamEntry, parts_of

# What post-processing of a module was last run for: (run id, version, bytes received).
Stamp = tuple[str, int, int]


@dataclass(slots=True)
class _Progress:
    """What the session `token` has received."""

    token: str
    covered: frozenset[str]
    coverage: dict[str, Coverage]
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
    """Not thread-safe: the caller serialises its methods.

    `parameters` are the engine's live tensors, named as in `table`; they are written in place. `post_process`
    maps a module to the transform run exactly once per update that covers it, after its last byte.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        table: EngineTable,
        state: WeightState,
        *,
        post_process: Mapping[str, Callable[[], None]] | None = None,
    ):
        for entry in table.entries:
            tensor = parameters.get(entry.alias_of or entry.name)
            if tensor is None or tuple(tensor.shape) != entry.shape or dtype_name(tensor.dtype) != entry.dtype:
                raise WeightUpdateError("bad_table", f"engine table entry {entry.name} does not describe a parameter")
        self.table = table
        self.state = state
        self.stamps: dict[str, Stamp] = {}
        self._parameters = parameters
        self._post_process = dict(post_process or {})
        self._progress: _Progress | None = None

    def digests(self) -> dict[str, str]:
        """Destination -> digest (hex) of the bytes it holds now, aliases left out."""
        names = [entry.name for entry in self.table.entries if entry.filled_by_sync]
        return {name: f"{digest(self._parameters[name]):#x}" for name in names}

    def check_begin(self, begin: BeginUpdate) -> None:
        """Refuses an update that was planned for another table or names modules the engine lacks; changes nothing."""
        if begin.table_digest != self.table.table_digest:
            raise WeightUpdateError(
                "table_changed", "the engine's table is another: read /parameter_table again", fatal=False
            )
        modules = self._modules()
        covered = modules if begin.selector == "all" else frozenset(begin.selector)
        if not covered or not covered <= modules:
            message = f"selector {begin.selector!r} names modules the engine lacks; it has {sorted(modules)}"
            raise WeightUpdateError("unknown_module", message, fatal=False)

    def start(self, session: UpdateSession) -> None:
        """Expect what the session announced; nothing has arrived yet."""
        selector = session.begin.selector
        covered = self._modules() if selector == "all" else frozenset(selector)
        coverage = {e.name: Coverage(e.shape) for e in self.table.entries if e.filled_by_sync and e.module in covered}
        self._progress = _Progress(session.token, covered, coverage)

    def load(self, token: str, plan_digest: str, header: BucketHeader, buffer: torch.Tensor, now: float) -> int | None:
        """Verify one bucket, then copy its pieces into place. Returns the digest computed here (None: not asked).

        `buffer`: uint8 [>= header.nbytes]. Nothing is written unless the whole bucket passed its checks.
        """
        progress = self._checked(token, plan_digest, header.version)
        if header.sequence != progress.sequence:
            self._fatal("bad_sequence", f"bucket {header.sequence} arrived where {progress.sequence} was due")
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
        targets = [self._target(progress, piece, header) for piece in header.pieces]
        with torch.inference_mode():
            for piece, target in zip(header.pieces, targets, strict=True):
                target.copy_(piece_view(buffer, piece).view(target.shape))
                self._count(progress, self.table.by_name[piece.name], piece.nbytes)
        progress.sequence += 1
        self.state.heard(token, now)
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
        progress = self._checked(token, plan_digest, version)
        unknown = set(shapes)
        with torch.inference_mode():
            for entry in self.table.entries:
                names = entry.fused_from or (entry.name,)
                if entry.name not in progress.coverage or not all(name in shapes for name in names):
                    continue
                if entry.scale != "none":
                    self._fatal("format_mismatch", f"{entry.name} is quantised ({entry.scale}), the source is not")
                try:
                    parts = parts_of(entry, shapes, self.table)
                except WeightWireError as error:
                    self._fatal("shape_mismatch", str(error))
                for part in parts:
                    target = _narrow(self._parameters[entry.name].detach(), part.slot)
                    self._take(progress, entry.name, part.slot, f"version {version}, parameter {entry.name}")
                    source = _narrow(read(part.hf_name, target.reshape(part.shape)), part.slice)
                    target.copy_(source.reshape(target.shape))
                    unknown.discard(part.hf_name)
                    self._count(progress, entry, target.numel() * target.element_size())
        if unknown:
            self._fatal("unknown_name", f"version {version} offers unknown names: {', '.join(sorted(unknown)[:20])}")
        progress.sequence += 1
        self.state.heard(token, now)

    def complete(self, token: str, plan_digest: str, version: int, buckets: int) -> None:
        """All bytes are in: refuse what is missing, then post-process each covered module once."""
        progress = self._checked(token, plan_digest, version)
        missing = {name: held for name, held in sorted(progress.coverage.items()) if not held.complete}
        if buckets != progress.sequence or missing:
            shown = "; ".join(f"{name}: {held.gaps()}" for name, held in list(missing.items())[:20])
            self._fatal(
                "missing_pieces",
                f"version {version} ended after {progress.sequence} of {buckets} buckets; waiting for "
                f"{len(missing)} parameters: {shown or '-'}{'; ...' if len(missing) > 20 else ''}",
            )
        run_id = self.state.require_session(token).begin.run_id
        for module in sorted(progress.covered):
            stamp = (run_id, version, progress.module_bytes.get(module, 0))
            if self.stamps.get(module) != stamp and module in self._post_process:
                self._post_process[module]()
            self.stamps[module] = stamp

    def require_selector(self, token: str, selector: str | tuple[str, ...]) -> None:
        """The selector announced at begin goes unchanged through every message."""
        announced = self.state.require_session(token).begin.selector
        if selector != announced:
            self._fatal("selector_mismatch", f"selector {selector!r} inside an update begun with {announced!r}")

    def _target(self, progress: _Progress, piece: Piece, header: BucketHeader) -> torch.Tensor:
        """The storage a piece lands in, after every check against the engine's own table."""
        where = f"bucket {header.sequence} of version {header.version}, parameter {piece.name}"
        entry = self.table.by_name.get(piece.name)
        if entry is None or not entry.filled_by_sync:
            self._fatal("unknown_name", f"{where}: the engine has no such destination")
        if entry.module not in progress.covered:
            self._fatal("not_covered", f"{where}: module {entry.module} is outside the selector")
        if (piece.dtype, piece.scale) != (entry.dtype, entry.scale):
            self._fatal(
                "format_mismatch",
                f"{where}: sent as {piece.dtype} scale {piece.scale}, the engine holds {entry.dtype} scale {entry.scale}",
            )
        if piece.slot is None and entry.pieces != 1:
            self._fatal("shape_mismatch", f"{where}: a fused parameter needs a slot for each of {entry.pieces} pieces")
        target = self._parameters[piece.name].detach()
        if piece.slot is None and tuple(target.shape) != piece.shape:
            self._fatal("shape_mismatch", f"{where}: sent {list(piece.shape)}, the engine holds {list(target.shape)}")
        self._take(progress, piece.name, piece.slot, where)
        target = _narrow(target, piece.slot)
        if target.numel() != prod(piece.shape):
            self._fatal("shape_mismatch", f"{where}: sent {list(piece.shape)} for {list(target.shape)}")
        return target

    def _take(self, progress: _Progress, name: str, slot: Slot | None, where: str) -> None:
        coverage = progress.coverage[name]
        refusal = coverage.refusal(slot)
        if refusal is not None:
            self._fatal("bad_slot", f"{where}: {refusal}")
        coverage.add(slot)

    def _modules(self) -> frozenset[str]:
        return frozenset(entry.module for entry in self.table.entries if entry.filled_by_sync)

    def _count(self, progress: _Progress, entry: ParamEntry, nbytes: int) -> None:
        # What was processed before is not what is there now, whatever numbers this update shares with an earlier one.
        self.stamps.pop(entry.module, None)
        progress.module_bytes[entry.module] = progress.module_bytes.get(entry.module, 0) + nbytes

    def _checked(self, token: str, plan_digest: str, version: int) -> _Progress:
        session = self.state.require_session(token)
        assert self._progress is not None, "begin starts the progress of its session"
        if plan_digest != session.begin.plan_digest:
            self._fatal("plan_mismatch", f"plan digest {plan_digest} differs from {session.begin.plan_digest} at begin")
        if version != session.begin.version:
            self._fatal("version_mismatch", f"version {version} inside the update to {session.begin.version}")
        return self._progress

    def _fatal(self, code: str, message: str) -> NoReturn:
        session = self.state.session
        assert session is not None, "checks run inside a session"
        self.state.fail(session.token, code, message)
        raise WeightUpdateError(code, message)


def _narrow(tensor: torch.Tensor, slot: Slot | None) -> torch.Tensor:
    for dim, (start, stop) in enumerate(slot or ()):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor

"""One weight sync from the trainer's side, and the pusher that runs one after another.

    pusher = WeightPusher(["http://127.0.0.1:30000"], SyncConfig(), run_id="run-1")
    report = pusher.push(backend.state_for_sync(), version=1)

An engine reports version v only after `push(..., v)` gave it every byte. A failed engine is left dirty and out of
the live set; the others go on. `run_id` must differ between two lives of a trainer that may use the same version
numbers (a resumed run included), so that engines left over from the earlier one cannot pass for current.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from miles.data.weight_bucket import dtype_name
from miles.sync.bucket import BucketStager, FixedBucket, bucket_size
from miles.sync.checksum import ChecksumPolicy
from miles.sync.config import SyncConfig
from miles.sync.errors import NoEngineLeft, PlanError, SourceError, SyncBusyError, SyncError
from miles.sync.membership import LiveEngine, LiveSet
from miles.sync.plan import PlanEntry, SourceSpec, SyncPlan, build_plan
from miles.sync.report import SyncReport
from miles.sync.transports import Transport, choose
from miles.sync.update import UpdateSession

__all__ = ["SyncReport", "UpdateSession", "WeightPusher"]

Weights = Iterable[tuple[str, torch.Tensor]]


class WeightPusher:
    """Pushes whole versions into engines, one sync at a time, from one process (trainer rank 0).

    Blocking; every wait is bounded by `sync.timeout_s` plus bytes / `sync.min_gb_per_s`. Use `close` (or `with`)
    to release connections and shared memory.
    """

    def __init__(self, engine_urls: Sequence[str], config: SyncConfig, run_id: str):
        self.version: int | None = None
        self._config = config
        self._run_id = run_id
        self._live = LiveSet(engine_urls)
        self._checksums = ChecksumPolicy(config.checksum)
        self._transport: Transport | None = None
        self._buckets: dict[str, FixedBucket] = {}
        self._plan: SyncPlan | None = None
        self._plan_key: tuple[object, ...] = ()
        self._weight_map: dict[str, SourceSpec] = {}
        self._weight_maps = 0
        self._changes_seen = 0
        self._busy = threading.Lock()

    def __enter__(self) -> WeightPusher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def set_engines(self, urls: Sequence[str]) -> None:
        """The engines of the next sync; a new one takes part from its first whole update on."""
        with self._busy:
            self._live.set_engines(urls)

    def push(self, weights: Weights, version: int, *, weight_map: Mapping[str, SourceSpec] | None = None) -> SyncReport:
        """Bring every live engine to `version`. `weights`: (Hugging Face name, full tensor) in any order.

        With `weight_map` (or from the second push on, which reuses the first one's) tensors are streamed; without,
        the first push holds all of them at once. Raises `PlanError` or `SourceError` (engines that began are dirty),
        `NoEngineLeft`, or `SyncBusyError` while another push runs.
        """
        if not self._busy.acquire(blocking=False):
            raise SyncBusyError(f"a weight sync is running; push of version {version} refused")
        try:
            if self.version is not None and version <= self.version:
                raise SyncError(f"weight version {version} is not above {self.version}, the last one pushed")
            return self._push(weights, version, weight_map)
        finally:
            self._busy.release()

    def close(self) -> None:
        with self._busy:
            for bucket in self._buckets.values():
                bucket.close()
            self._buckets = {}
            if self._transport is not None:
                self._transport.close()
                self._transport = None
            self._live.close()

    def _push(self, weights: Weights, version: int, weight_map: Mapping[str, SourceSpec] | None) -> SyncReport:
        clock = _Phases()
        if weight_map is None and not self._weight_map:
            weights = list(weights)
            weight_map = {name: SourceSpec(tuple(t.shape), dtype_name(t.dtype)) for name, t in weights}
            if len(weight_map) != len(weights):
                raise PlanError("the trainer offered the same weight name twice")
        if weight_map is not None:
            self._weight_map = dict(weight_map)
            self._weight_maps += 1
        session, away = self._open(version, clock)
        stagers: dict[str, BucketStager] = {}
        try:
            stagers = self._stagers(session, version, checksum=self._checksums.next_sync())
            tensors = self._stream(weights, stagers, session)
            clock.mark("stream")
            session.end({key: stager.sequence for key, stager in stagers.items()})
            clock.mark("end")
        except BaseException as error:
            self._drain()
            session.abort(f"{type(error).__name__}: {error}")
            self._drop(session)
            raise
        self._drop(session)
        if not session.working:
            raise NoEngineLeft(
                f"no engine took version {version}: " + "; ".join(str(error) for error in session.failures.values())
            )
        self.version = version
        assert self._plan is not None
        assert self._transport is not None
        return SyncReport(
            version=version,
            run_id=self._run_id,
            plan_digest=self._plan.digest,
            transport=self._transport.name,
            tensors=tensors,
            buckets=sum(stager.sequence for stager in stagers.values()),
            nbytes=sum(stager.bytes_sent for stager in stagers.values()),
            bucket_bytes=max(bucket.nbytes for bucket in self._buckets.values()),
            checksummed=any(stager.checksum for stager in stagers.values()),
            total_s=clock.total(),
            seconds=clock.seconds,
            engines={
                **dict.fromkeys(session.engines, "serving"),
                **{url: str(error) for url, error in session.failures.items()},
                **away,
            },
            sources={url: engine.table.source for url, engine in session.engines.items()},
        )

    def _open(self, version: int, clock: _Phases) -> tuple[UpdateSession, dict[str, str]]:
        """Freeze, plan, begin. Engines that restarted since they were read are read again, once."""
        for attempt in (1, 2):
            engines, away = self._live.freeze(timeout_s=self._config.timeout_s)
            plan, transport = self._prepare(engines)
            clock.mark("plan")
            session = UpdateSession(
                engines, self._live, plan, version=version, config=self._config, transport=transport
            )
            session.begin()
            clock.mark("begin")
            stale = [url for url, error in session.failures.items() if error.code == "table_changed"]
            if not stale or attempt == 2:
                return session, away
            # The version was begun on the others but no byte was sent: start over with everyone at the same plan.
            session.abort("another engine restarted; beginning again")
            for url in session.failures:
                self._live.drop(url)
        raise AssertionError("unreachable")

    def _prepare(self, engines: Sequence[LiveEngine]) -> tuple[SyncPlan, Transport]:
        key = (tuple(sorted({e.table.layout_key for e in engines})), self._weight_maps)
        if self._plan is None or key != self._plan_key:
            self._plan = build_plan(self._weight_map, [e.table for e in engines], run_id=self._run_id)
            self._plan_key = key
        if self._transport is None:
            self._transport = choose(self._config, engines)
        if self._live.changes != self._changes_seen:
            self._changes_seen = self._live.changes
            self._checksums.membership_changed()
        self._transport.connect(engines, self._plan)
        size = bucket_size(self._plan, self._config.bucket_bytes)
        for layout_key in self._plan.layouts:
            if layout_key not in self._buckets:
                count = 2 if self._config.double_buffer else 1
                self._buckets[layout_key] = FixedBucket(count, self._transport.allocate, self._transport.release)
            self._buckets[layout_key].reserve(size)
        return self._plan, self._transport

    def _stagers(self, session: UpdateSession, version: int, *, checksum: bool) -> dict[str, BucketStager]:
        assert self._plan is not None
        return {
            key: BucketStager(
                plan=self._plan,
                layout_key=key,
                version=version,
                bucket=self._buckets[key],
                checksum=checksum,
                send=lambda header, buffer, key=key: session.send(key, header, buffer),
            )
            for key in self._plan.layouts
        }

    def _stream(self, weights: Weights, stagers: Mapping[str, BucketStager], session: UpdateSession) -> int:
        """Stage and send everything; returns the number of tensors. Waits for all acknowledgements."""
        assert self._plan is not None
        left = set(self._plan.by_source)
        offered = iter(weights)
        count = 0
        try:
            for name, tensor in _checked(offered, self._plan, left):
                if session.working:
                    for entry in self._plan.by_source[name]:
                        stagers[entry.layout_key].add(entry, _sliced(entry, tensor))
                left.discard(name)
                count += 1
        except SyncError:
            # The other ranks of the mesh gather along with this iterator: leave none of them waiting.
            for _ in offered:
                pass
            raise
        if left:
            shown = ", ".join(sorted(left)[:20])
            raise SourceError(f"the trainer offered no tensor for {len(left)} planned weights: {shown}")
        for stager in stagers.values():
            stager.flush()
        self._drain()
        return count

    def _drain(self) -> None:
        for bucket in self._buckets.values():
            bucket.drain()

    def _drop(self, session: UpdateSession) -> None:
        for url in session.failures:
            self._live.drop(url)


class _Phases:
    """Wall seconds per phase of one sync."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        return time.perf_counter() - self._start


def _checked(weights: Weights, plan: SyncPlan, left: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor after comparison with the plan: known, once, same shape and dtype, finite."""
    for name, tensor in weights:
        entries = plan.by_source.get(name)
        if entries is None:
            raise SourceError(f"{name} is not in the plan {plan.digest[:12]}: the trainer's weight names changed")
        if name not in left:
            raise SourceError(f"{name} was offered twice in one sync")
        source = entries[0].source
        if tuple(tensor.shape) != source.shape or dtype_name(tensor.dtype) != source.dtype:
            raise SourceError(
                f"{name}: {list(tensor.shape)} {tensor.dtype} offered, {list(source.shape)} {source.dtype} planned"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            raise SourceError(
                f"{name}: {bad} of {tensor.numel()} values are not finite; nothing is served from this sync"
            )
        yield name, tensor.detach()


def _sliced(entry: PlanEntry, tensor: torch.Tensor) -> torch.Tensor:
    for dim, (start, stop) in enumerate(entry.slice or ()):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor

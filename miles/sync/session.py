"""The pusher: one weight sync after another, from one process of the trainer.

    pusher = WeightPusher(["http://127.0.0.1:30000"], SyncConfig(), run_id="run-1")
    report = pusher.push(backend.state_for_sync(), version=1)

An engine reports version v only after `push(..., v)` gave it every byte. A failed engine is left dirty and out of
the live set; the others go on. `run_id` must differ between two lives of a trainer that may use the same version
numbers (a resumed run included), so that engines left over from the earlier one cannot pass for current.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.sync.checksum import ChecksumPolicy
from miles.sync.config import SyncConfig
from miles.sync.entry import SourceSpec
from miles.sync.errors import NoEngineLeft, SyncBusyError, SyncError
from miles.sync.membership import LiveEngine, LiveSet
from miles.sync.plan import SyncPlan, build_plan
from miles.sync.report import SyncReport
from miles.sync.sender import BucketSender, Moved
from miles.sync.source import Weights, checked, weight_map_of
from miles.sync.transports import BucketTransport, FolderTransport, Transport, choose
from miles.sync.update import UpdateSession
from miles.sync.updaters import EngineKind, updater_for

__all__ = ["SyncReport", "UpdateSession", "WeightPusher"]


class WeightPusher:
    """Pushes whole versions into engines, one sync at a time, from one process (trainer rank 0).

    Blocking; every wait is bounded by `sync.timeout_s` plus bytes / `sync.min_gb_per_s`. Use `close` (or `with`)
    to release connections and shared memory. `directory` is used by the disk transports when `sync.directory` is
    not set; `engine` is the kind of all engines; `nvfp4` is how weights are quantised for engines that store NVFP4; `token` is what the engines' routes want.
    """

    def __init__(
        self,
        engine_urls: Sequence[str],
        config: SyncConfig,
        run_id: str,
        *,
        engine: EngineKind = "embedded",
        token: str | None = None,
        directory: Path | None = None,
        nvfp4: NVFP4QDQConfig | None = None,
    ):
        self.version: int | None = None
        self._config = config
        self._run_id = run_id
        self._directory = Path(config.directory) if config.directory is not None else directory
        self._nvfp4 = nvfp4 or NVFP4QDQConfig()
        self._updater = updater_for(engine)
        self._live = LiveSet(engine_urls, self._updater, token=token)
        self._checksums = ChecksumPolicy(config.checksum)
        self._transport: Transport | None = None
        self._sender: BucketSender | None = None
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
        `NoEngineLeft`, or `SyncBusyError` while another push runs. `weights` is always read to its end.
        """
        if not self._busy.acquire(blocking=False):
            raise SyncBusyError(f"a weight sync is running; push of version {version} refused")
        offered = iter(weights)
        try:
            if self.version is not None and version <= self.version:
                raise SyncError(f"weight version {version} is not above {self.version}, the last one pushed")
            return self._push(offered, version, weight_map)
        except SyncError:
            # The other ranks of the mesh gather along with this iterator: leave none of them waiting.
            for _ in offered:
                pass
            raise
        finally:
            self._busy.release()

    def close(self) -> None:
        with self._busy:
            if self._sender is not None:
                self._sender.close()
                self._sender = None
            if self._transport is not None:
                self._transport.close()
                self._transport = None
            self._live.close()
            self._updater.close()

    def _push(self, weights: Weights, version: int, weight_map: Mapping[str, SourceSpec] | None) -> SyncReport:
        clock = _Phases()
        if weight_map is None and not self._weight_map:
            held = list(weights)
            weights, weight_map = held, weight_map_of(held)
        if weight_map is not None:
            self._weight_map = dict(weight_map)
            self._weight_maps += 1
        plan, transport, engines, away = self._prepare()
        clock.mark("plan")
        moved = None
        if isinstance(transport, FolderTransport):
            # The engines still serve the version before while this is written.
            names = list(plan.by_source)
            nbytes = transport.write(checked(weights, plan), plan, version)
            moved = Moved(len(names), nbytes, dict.fromkeys(plan.layouts, 1), checksummed=True)
            clock.mark("write")
        plan, engines, session = self._begin(plan, engines, version)
        clock.mark("begin")
        try:
            if moved is not None and isinstance(transport, FolderTransport):
                session.load_folder(*transport.message(), moved.nbytes)
            else:
                assert self._sender is not None
                checksum = self._checksums.next_sync()
                moved = self._sender.stream(weights, plan, session, version=version, checksum=checksum)
            clock.mark("stream")
            session.end(moved.buckets)
            if isinstance(transport, FolderTransport):
                self._reload_whole(transport, session, plan, version, moved)
            clock.mark("end")
        except BaseException as error:
            if self._sender is not None:
                self._sender.drain()
            session.abort(f"{type(error).__name__}: {error}")
            self._drop(session)
            raise
        self._drop(session)
        if not session.working:
            raise NoEngineLeft(
                f"no engine took version {version}: " + "; ".join(str(error) for error in session.failures.values())
            )
        self.version = version
        return self._report(plan, transport, session, moved, away, clock)

    def _prepare(self) -> tuple[SyncPlan, Transport, tuple[LiveEngine, ...], dict[str, str]]:
        """Freeze the live set, plan for it, connect the transport. No engine is touched beyond being read."""
        engines, away = self._live.freeze(self._weight_map, timeout_s=self._config.timeout_s)
        key = (tuple(sorted({e.table.layout_key for e in engines})), self._weight_maps)
        if self._plan is None or key != self._plan_key:
            self._plan = build_plan(self._weight_map, [e.table for e in engines], run_id=self._run_id)
            self._plan_key = key
        if self._transport is None:
            self._transport = choose(self._config, engines, self._live, run_id=self._run_id, directory=self._directory)
            if isinstance(self._transport, BucketTransport):
                self._sender = BucketSender(
                    self._transport,
                    bucket_bytes=self._config.bucket_bytes,
                    double_buffer=self._config.double_buffer,
                    nvfp4=self._nvfp4,
                )
        if self._live.changes != self._changes_seen:
            self._changes_seen = self._live.changes
            self._checksums.membership_changed()
        self._transport.connect(engines, self._plan)
        if self._sender is not None:
            self._sender.reserve(self._plan)
        return self._plan, self._transport, engines, away

    def _begin(
        self, plan: SyncPlan, engines: tuple[LiveEngine, ...], version: int
    ) -> tuple[SyncPlan, tuple[LiveEngine, ...], UpdateSession]:
        """Open the session on every engine; once more, re-read and re-planned, if one restarted since it was read."""
        session = self._session(engines, plan, version)
        session.begin()
        stale = [url for url, error in session.failures.items() if error.code == "table_changed"]
        if stale:
            # No byte was sent yet: start over, so that all engines are at one plan.
            session.abort("another engine restarted; beginning again")
            for url in stale:
                self._live.drop(url)
            plan, _, engines, _ = self._prepare()
            session = self._session(engines, plan, version)
            session.begin()
        return plan, engines, session

    def _session(self, engines: Sequence[LiveEngine], plan: SyncPlan, version: int) -> UpdateSession:
        buckets = self._transport if isinstance(self._transport, BucketTransport) else None
        return UpdateSession(
            engines, self._live, plan, version=version, config=self._config, updater=self._updater, buckets=buckets
        )

    def _reload_whole(
        self, transport: FolderTransport, session: UpdateSession, plan: SyncPlan, version: int, moved: Moved
    ) -> None:
        """Engines that answered but could not use the delta get the whole version in a second session."""
        answered = [session.engines[url] for url, e in session.failures.items() if e.code != "unreachable"]
        if answered and transport.fall_back():
            again = self._session(answered, plan, version)
            again.begin()
            again.load_folder(*transport.message(), moved.nbytes)
            again.end(moved.buckets)
            for engine in answered:
                del session.failures[engine.url]
            session.failures.update(again.failures)
        transport.finished()

    def _drop(self, session: UpdateSession) -> None:
        for url in session.failures:
            self._live.drop(url)

    def _report(
        self,
        plan: SyncPlan,
        transport: Transport,
        session: UpdateSession,
        moved: Moved,
        away: Mapping[str, str],
        clock: _Phases,
    ) -> SyncReport:
        assert self.version is not None
        return SyncReport(
            version=self.version,
            run_id=self._run_id,
            plan_digest=plan.digest,
            transport=transport.name,
            tensors=moved.tensors,
            buckets=sum(moved.buckets.values()),
            nbytes=moved.nbytes,
            bucket_bytes=self._sender.nbytes if self._sender is not None else 0,
            checksummed=moved.checksummed,
            total_s=clock.total(),
            seconds=clock.seconds,
            engines={
                **dict.fromkeys(session.engines, "serving"),
                **{url: str(error) for url, error in session.failures.items()},
                **away,
            },
        )


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

"""All actors of a run: started together on one placement group, called with bounded waits, stopped without loss."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from miles.config.errors import MilesError
from miles.config.files import storage_error
from miles.orchestrate.actors import EngineActor, TrainWorker
from miles.orchestrate.bounded import finishes_within
from miles.orchestrate.errors import RunError
from miles.orchestrate.node_files import check_nodes
from miles.orchestrate.node_watch import RESUME_HINT, watching_nodes
from miles.orchestrate.placement import Placement
from miles.orchestrate.reservation import Reservation
from miles.orchestrate.run_folder import RunFolder
from miles.orchestrate.sweeper_handle import announce_stop
from miles.recipe import Recipe
from miles.rollout.access import new_token
from miles.rollout.errors import EngineHttpError, EngineUnreachable
from miles.sync.errors import EngineSyncError, NoEngineLeft

STOP_WAIT_S = 5.0
# A full or read-only disk is the user's to mend, wherever it was met.
STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
# What a dead engine looks like to those that talk to it; the next life of the run starts others.
ENGINE_LOST = (EngineUnreachable, EngineHttpError, EngineSyncError, NoEngineLeft)


@dataclass
class ActorGroup:
    """Handles of the running actors. `resumed` is the loop's state from the checkpoint, None for a new run."""

    timeout_s: float
    workers: list[Any]
    engines: list[Any]
    dp_ranks: list[int] = field(default_factory=list)
    engine_urls: list[str] = field(default_factory=list)
    resumed: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    # What the engines of this life of the run want of their clients.
    token: str = field(default_factory=new_token, repr=False)

    async def on_all_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call every trainer rank with the same arguments; results by rank."""
        return await self.on_workers(method, [arguments] * len(self.workers))

    async def on_workers(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Call trainer ranks (default: all) with their own arguments; the first failure ends the wait for all."""
        return await self.ask_workers(method, arguments, ranks=ranks)()

    def ask_workers(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, ranks: Sequence[int] | None = None
    ) -> Callable[[], Awaitable[list[Any]]]:
        """`on_workers` in two parts: the calls stand in the ranks' queues now, what is returned waits for the results."""
        workers = self.workers if ranks is None else [self.workers[rank] for rank in ranks]
        calls = [getattr(worker, method).remote(*given) for worker, given in zip(workers, arguments, strict=True)]
        return partial(self._gather, "trainer", method, calls)

    async def on_engines(self, method: str) -> list[Any]:
        """Call every engine actor."""
        return await self._gather("engine", method, [getattr(e, method).remote() for e in self.engines])

    async def connect(self) -> None:
        """Open the weight sync to every engine, under a new id: engines left over from an earlier life of the run
        cannot pass for current. Without engines there is none."""
        if not self.engine_urls:
            return
        await self.on_all_workers("connect", self.engine_urls, uuid.uuid4().hex, self.token)

    async def _gather(self, role: str, method: str, calls: list[Any]) -> list[Any]:
        waits = [asyncio.ensure_future(_result(call, f"{role} {i}: {method}")) for i, call in enumerate(calls)]
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.gather(*waits)
        except TimeoutError:
            raise RunError(
                f"{role}: {method} did not finish within {self.timeout_s:g} s (run.timeout_s); {RESUME_HINT}"
            ) from None
        finally:
            for wait in waits:
                wait.cancel()


async def _result(call: Any, what: str) -> Any:
    import ray

    try:
        return await call
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MilesError):
            raise cause from None
        if isinstance(cause, OSError) and cause.errno in STORAGE_ERRNOS:
            raise storage_error(Path(cause.filename or what), cause) from None
        raise RunError(f"{what} failed: {error}") from None
    except ray.exceptions.RayActorError as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(f"{what}: the process died ({reason}); {RESUME_HINT}") from None


@contextlib.contextmanager
def saying_how_to_resume() -> Iterator[None]:
    """The loss of an engine is a `RunError` that says what to do, whoever met it first."""
    try:
        yield
    except ENGINE_LOST as error:
        raise RunError(f"{error}; {RESUME_HINT}") from error


@contextlib.asynccontextmanager
async def running_actors(
    recipe: Recipe, placement: Placement, model_dir: Path, folder: RunFolder
) -> AsyncIterator[ActorGroup]:
    """Start engines and trainer ranks side by side, load or resume, connect the weight sync; stop them at the end."""
    recipe, model_dir, run = _with_whole_paths(recipe), model_dir.absolute(), RunFolder(folder.path.absolute())
    async with _reserved(recipe, placement, run.path, model_dir) as reservation:
        token = new_token()
        engines = [
            reservation.actor(EngineActor, device).remote(
                recipe, model_dir, index, device, placement.engine_host(index, recipe.engine.host), run.logs, token
            )
            for index, device in enumerate(placement.engine_devices)
        ]
        actors = ActorGroup(
            recipe.run.timeout_s, _trainers(reservation, recipe, placement, model_dir), engines, token=token
        )
        try:
            with saying_how_to_resume():
                async with watching_nodes(placement):
                    await _start(actors, placement, run.checkpoints)
                    yield actors
        finally:
            await _stop(actors)


@contextlib.asynccontextmanager
async def running_trainers(
    recipe: Recipe, placement: Placement, model_dir: Path, bundle: Path
) -> AsyncIterator[ActorGroup]:
    """Trainer ranks alone, nothing loaded. `bundle`: the folder that they read."""
    recipe, model_dir = _with_whole_paths(recipe), model_dir.absolute()
    async with _reserved(recipe, placement, bundle.absolute(), model_dir) as reservation:
        actors = ActorGroup(recipe.run.timeout_s, _trainers(reservation, recipe, placement, model_dir), [])
        try:
            async with watching_nodes(placement):
                yield actors
        finally:
            await _stop(actors)


@contextlib.asynccontextmanager
async def _reserved(recipe: Recipe, placement: Placement, shared: Path, model_dir: Path) -> AsyncIterator[Reservation]:
    """The placement's reservation, on nodes that see the folders."""
    reservation = await asyncio.to_thread(Reservation, placement, wait_s=recipe.run.timeout_s)
    try:
        models = [model_dir, *([Path(recipe.algo.teacher)] if recipe.algo.teacher is not None else [])]
        await asyncio.to_thread(check_nodes, reservation, placement, shared, models)
        yield reservation
    finally:
        finishes_within(STOP_WAIT_S, reservation.give_back)


def _trainers(reservation: Reservation, recipe: Recipe, placement: Placement, model_dir: Path) -> list[Any]:
    return [
        reservation.actor(TrainWorker, device).remote(recipe, model_dir, rank, device)
        for rank, device in enumerate(placement.trainer_devices)
    ]


def _with_whole_paths(recipe: Recipe) -> Recipe:
    """Actors on other nodes have another working folder."""
    teacher, sync = recipe.algo.teacher, recipe.sync.directory
    algo = recipe.algo.model_copy(update={"teacher": None if teacher is None else str(Path(teacher).absolute())})
    moved = recipe.sync.model_copy(update={"directory": None if sync is None else str(Path(sync).absolute())})
    return recipe.model_copy(update={"algo": algo, "sync": moved})


async def _start(actors: ActorGroup, placement: Placement, checkpoints: Path) -> None:
    async def trainers() -> list[dict[str, Any]]:
        address, port = (await actors.on_workers("offer_port", [(placement.meeting_address,)], ranks=[0]))[0]
        return await actors.on_all_workers("start", address, port, checkpoints)

    states, engines = await asyncio.gather(trainers(), actors.on_engines("ready"))
    actors.dp_ranks = [state["dp_rank"] for state in states]
    actors.resumed, actors.notes = states[0]["extra"], states[0]["notes"]
    actors.engine_urls = [engine["url"] for engine in engines]
    await actors.connect()


async def _stop(actors: ActorGroup) -> None:
    import ray

    announce_stop()
    calls = [engine.kill.remote() for engine in actors.engines] + [worker.close.remote() for worker in actors.workers]

    def stop() -> None:
        with contextlib.suppress(Exception):
            ray.wait(calls, num_returns=len(calls), timeout=STOP_WAIT_S)
        for actor in (*actors.engines, *actors.workers):
            with contextlib.suppress(Exception):
                ray.kill(actor)

    finishes_within(2 * STOP_WAIT_S, stop)

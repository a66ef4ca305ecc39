"""An error keeps its class, text and exit code on its way from an actor to the command line."""

from __future__ import annotations

import asyncio
import errno
import importlib
import inspect
import os
import pickle
import pkgutil
from typing import Any

import pytest

import miles
from miles.config import ConfigError, MilesError
from miles.orchestrate import actor_group
from miles.orchestrate.actor_group import ActorGroup
from miles.orchestrate.errors import RunError
from miles.orchestrate.loop import check_engines
from miles.rollout.errors import EngineHttpError, EngineUnreachable
from miles.sync.errors import EngineSyncError, NoEngineLeft


def error_classes() -> list[type[MilesError]]:
    """Every error of every package's `errors` module."""
    names = [m.name for m in pkgutil.walk_packages(miles.__path__, "miles.") if m.name.endswith(".errors")]
    found = {
        kind
        for name in names
        for _, kind in inspect.getmembers(importlib.import_module(name), inspect.isclass)
        if issubclass(kind, MilesError)
    }
    return sorted(found, key=lambda kind: f"{kind.__module__}.{kind.__name__}")


# A value for each type of argument that an error takes.
SAMPLES = {"int": 503, "str": "busy", "float | None": 0.5}


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[MilesError]) -> None:
    own = [p for p in inspect.signature(kind.__init__).parameters.values() if p.annotation is not p.empty]
    keywords = {p.name: SAMPLES[str(p.annotation)] for p in own if p.kind is p.KEYWORD_ONLY}
    given = [SAMPLES[str(p.annotation)] for p in own if p.kind is p.POSITIONAL_OR_KEYWORD] or ["what happened"]
    error = kind(*given, **keywords)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.exit_code) == (str(error), error.exit_code)
    assert {name: getattr(back, name) for name in keywords} == keywords


class FakeWorker:
    """An actor whose method `work` ends in `error`, as Ray would report it."""

    def __init__(self, error: BaseException | None, delay_s: float = 0.0) -> None:
        async def call() -> str:
            await asyncio.sleep(delay_s)
            if error is not None:
                raise error
            return "done"

        self.work = type("Method", (), {"remote": staticmethod(call)})


def call(*workers: FakeWorker, timeout_s: float = 5.0) -> list[Any]:
    return asyncio.run(ActorGroup(timeout_s, list(workers), []).on_all_workers("work"))


def task_error(cause: Exception) -> Exception:
    import ray.exceptions

    return ray.exceptions.RayTaskError(
        "work", f"ray::Worker.work()\n  File x, line 1\n{type(cause).__name__}: {cause}", cause
    )


def test_results_come_by_rank() -> None:
    assert call(FakeWorker(None, 0.02), FakeWorker(None)) == ["done", "done"]


def test_error_of_ours_is_raised_as_it_was() -> None:
    with pytest.raises(ConfigError, match=r"^model\.path x: no such folder$") as raised:
        call(FakeWorker(task_error(ConfigError("model.path x: no such folder"))))
    assert raised.value.exit_code == 2


def test_full_disk_in_an_actor_is_the_users_to_mend() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/file")
    with pytest.raises(ConfigError, match=r"^/data/file: the disk is full; free space"):
        call(FakeWorker(task_error(full)))


def test_unexpected_error_names_rank_and_call_and_keeps_the_traceback() -> None:
    with pytest.raises(RunError, match=r"trainer 1: work failed: (.|\n)*ValueError: bug") as raised:
        call(FakeWorker(None), FakeWorker(task_error(ValueError("bug"))))
    assert raised.value.exit_code == 1


def test_dead_actor_says_how_to_resume() -> None:
    import ray.exceptions

    with pytest.raises(RunError, match=r"trainer 0: work: the process died .*run the same command again to resume"):
        call(FakeWorker(ray.exceptions.RayActorError()))


@pytest.mark.parametrize(
    "error",
    [
        NoEngineLeft("no engine took version 14: engine http://h:1: unreachable: ConnectionResetError"),
        EngineSyncError("http://h:1", "unreachable", "ConnectionResetError"),
        EngineUnreachable("engine http://h:1: connection lost"),
        EngineHttpError("engine http://h:1: 503", status=503, kind="dying"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_lost_engine_says_how_to_resume(error: MilesError) -> None:
    with pytest.raises(RunError) as raised, actor_group.saying_how_to_resume():
        call(FakeWorker(task_error(error)))
    assert str(raised.value) == f"{error}; what was saved is kept: run the same command again to resume"


def test_what_another_start_cannot_mend_does_not_promise_a_resume() -> None:
    with pytest.raises(ConfigError, match=r"^model\.path x: no such folder$"), actor_group.saying_how_to_resume():
        call(FakeWorker(task_error(ConfigError("model.path x: no such folder"))))


def test_engine_that_did_not_take_a_version_says_how_to_resume() -> None:
    check_engines(3, {"http://h:1": "serving"})
    with pytest.raises(
        RunError, match=r"version 3 did not reach every engine: http://h:2: dirty; .*run the same command"
    ):
        check_engines(3, {"http://h:1": "serving", "http://h:2": "dirty"})


def test_wait_on_an_actor_is_bounded() -> None:
    with pytest.raises(RunError, match=r"trainer: work did not finish within 0\.05 s \(run\.timeout_s\)"):
        call(FakeWorker(None, 5.0), timeout_s=0.05)


def test_first_failure_ends_the_wait_for_the_others() -> None:
    with pytest.raises(ConfigError, match="early"):
        call(FakeWorker(None, 4.0), FakeWorker(task_error(ConfigError("early"))), timeout_s=10.0)


def test_storage_errors_are_those_a_user_can_mend() -> None:
    assert errno.ENOSPC in actor_group.STORAGE_ERRNOS
    assert errno.ENOENT not in actor_group.STORAGE_ERRNOS

"""From a planned shard to the runner's job, and from the environment of CI to the facts of the run."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from miles_ci.environment import read
from miles_ci.errors import UsageError
from miles_ci.plan.model import Plan, Shard, Unit
from miles_ci.run.results import RunInfo


def only_files(units: Sequence[Unit], wanted: Sequence[str], suite: str) -> tuple[Unit, ...]:
    """The units of the wanted files or folders (`path` or `path::node`), each once; several nodes of a file are one unit.
    `UsageError` for one the suite does not plan."""
    whole: dict[str, Unit] = {}
    narrowed: dict[str, Unit] = {}
    for word in wanted:
        path, separator, node = word.partition("::")
        path = Path(path).as_posix()
        found = [unit for unit in units if unit.path == path or unit.path.startswith(f"{path}/")]
        if not found:
            raise UsageError(
                f"--file {path}: not planned in suite '{suite}'; `miles-ci explain {path}` tells where it runs and why"
            )
        if not separator or found[0].declaration_error is not None:
            whole.update({unit.id: unit for unit in found})
            continue
        if found[0].path != path:
            raise UsageError(f"--file {word}: a node is named by its file, and {path} is a folder")
        names = (*(narrowed[path].only if path in narrowed else ()), f"{path}::{node}")
        unique = tuple(dict.fromkeys(names))
        narrowed[path] = replace(found[0], id=path, nodes=unique, deselect=(), metric_bounds=(), narrowed=True)
    complete = {unit.path for unit in whole.values()}
    return (*whole.values(), *(unit for path, unit in narrowed.items() if path not in complete))


def run_info(plan: Plan, shard: Shard, *, environ: Mapping[str, str] | None = None) -> RunInfo:
    """Facts of this run from GitHub's variables, or local stand-ins."""
    env = os.environ if environ is None else environ
    attempt = env.get("GITHUB_RUN_ATTEMPT", "1")
    return RunInfo(
        suite=shard.suite,
        backend=shard.backend,
        hardware=shard.hardware,
        shard=f"{shard.index}/{shard.count}",
        plan_digest=plan.digest,
        cadence=plan.cadence,
        run_id=env.get("GITHUB_RUN_ID") or f"local-{uuid.uuid4().hex[:12]}",
        run_attempt=int(attempt) if attempt.isdigit() else 1,
        commit=plan.source or env.get("GITHUB_SHA", ""),
        event=env.get("GITHUB_EVENT_NAME", ""),
        ref=env.get("GITHUB_REF", ""),
        runner=read("MILES_CI_RUNNER_NAME", env) or env.get("RUNNER_NAME") or socket.gethostname(),
        host=socket.gethostname(),
        started_at=time.time(),
    )


def default_branch(environ: Mapping[str, str] | None = None) -> str:
    """The repository's default branch according to the event's payload; `main` where there is none."""
    path = (os.environ if environ is None else environ).get("GITHUB_EVENT_PATH")
    if not path:
        return "main"
    try:
        payload = json.loads(Path(path).read_text(encoding="utf-8"))
        return str(payload["repository"]["default_branch"])
    except (OSError, ValueError, KeyError, TypeError):
        return "main"


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """`i/n`, counted from 1."""
    if text is None:
        return None
    index, separator, count = text.partition("/")
    if not separator or not index.isdigit() or not count.isdigit() or not 1 <= int(index) <= int(count):
        raise UsageError(f"--shard {text}: write i/n with 1 <= i <= n, e.g. --shard 1/2")
    return int(index), int(count)

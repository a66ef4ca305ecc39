from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from miles_ci.bot.github import Client
from miles_ci.cli import main
from miles_ci.registry import load_fleet
from miles_ci.workflows.generate import render
from miles_ci.workflows.model import parse_yaml
from tests.fast.ci.bot.helpers.github_server import APP_ID, APP_TOKEN, BOT_ID, REPO, TOKEN, GitHub

ROOT = Path(__file__).resolve().parents[4]
HEAD = "a1" * 20


@pytest.fixture
def hub() -> Iterator[GitHub]:
    """A running server; the test fails if any request or reply broke GitHub's contract or a token's permissions."""
    server = GitHub()
    server.start()
    yield server
    server.stop()
    assert server.problems == []
    assert server.refused == []


class Clock:
    """Time that only sleeping moves."""

    def __init__(self) -> None:
        import time

        self.now = time.time()
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(hub: GitHub, clock: Clock) -> Client:
    return Client(hub.base, REPO, TOKEN, sleep=clock.sleep, clock=clock)


@pytest.fixture
def app(hub: GitHub, clock: Clock) -> Client:
    return Client(hub.base, REPO, APP_TOKEN, sleep=clock.sleep, clock=clock)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small repository with our registry: one passing and one failing test file, one that holds no test."""
    root = tmp_path / "checkout"
    (root / "tests/fast/sample").mkdir(parents=True)
    (root / "tests/fast-gpu").mkdir()
    shutil.copy(ROOT / "registry.yaml", root)
    shutil.copytree(ROOT / "docker", root / "docker")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    files = {
        "test_good.py": "def test_one():\n    assert 1 + 1 == 2\n\n\ndef test_two():\n    assert 'a' in 'abc'\n",
        "test_bad.py": "def test_fine():\n    assert True\n\n\ndef test_broken():\n    value = 3\n    assert value == 4, 'three is not four'\n",
        "test_empty.py": "VALUE = 1\n",
    }
    for name, text in files.items():
        (root / "tests/fast/sample" / name).write_text(text)
    gpu = "from miles_ci.declare import register_cuda_ci\n\nregister_cuda_ci(est_time=60, suite='stage-b-1-gpu-h200', hardware=['h200'], num_gpus=1, labels=['kernels'])\n\n\ndef test_gpu():\n    assert True\n"
    (root / "tests/fast-gpu/test_kernel.py").write_text(gpu)
    return root


Job = Callable[..., tuple[int, dict[str, str]]]


@dataclass(frozen=True)
class Step:
    """What a generated workflow really gives a bot job: names of variables, permissions of its two tokens."""

    env: frozenset[str]
    permissions: Mapping[str, str]
    app_permissions: Mapping[str, str]


@cache
def steps_of() -> dict[str, list[Step]]:
    """Bot job -> every step that runs it."""
    found: dict[str, list[Step]] = {}
    for text in render(load_fleet(ROOT / "registry.yaml")).values():
        for body in parse_yaml(text)["jobs"].values():
            given = next((step["with"] for step in body.get("steps") or [] if step.get("id") == "app"), {})
            app = {k.removeprefix("permission-"): v for k, v in given.items() if k.startswith("permission-")}
            for step in body.get("steps") or []:
                for name in re.findall(r"python -m miles_ci bot ([a-z-]+)", step.get("run", "")):
                    env = frozenset(step.get("env") or {})
                    found.setdefault(name, []).append(Step(env, body["permissions"], app))
    return found


def granted_by(every: list[Mapping[str, str]]) -> dict[str, str]:
    """What each of several steps may do."""
    names = set.intersection(*(set(one) for one in every))
    return {name: "read" if any(one[name] == "read" for one in every) else "write" for name in names}


@pytest.fixture
def job(hub: GitHub, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Run `miles-ci bot NAME` as a workflow would: environment in, exit code and outputs out."""
    counter = itertools.count()
    monkeypatch.chdir(checkout)
    monkeypatch.setattr("miles_ci.bot.one_comment.SETTLE_S", 0.0)
    base = {
        "APP_ID": str(APP_ID), "APP_TOKEN": APP_TOKEN, "BOT_ID": str(BOT_ID), "GITHUB_API_URL": hub.base, "GITHUB_REPOSITORY": REPO,
        "GITHUB_RUN_ATTEMPT": "1", "GITHUB_SERVER_URL": "https://github.com", "GITHUB_TOKEN": TOKEN,
    }  # fmt: skip

    def run(name: str, *args: str, event: dict[str, Any] | None = None, **env: str) -> tuple[int, dict[str, str]]:
        folder = tmp_path / f"step-{next(counter)}"
        folder.mkdir()
        values = base | env
        # Nothing reaches a job that its workflow step does not pass (GITHUB_* beside the token is the runner's).
        steps = steps_of()[name]
        passed = frozenset.intersection(*(step.env for step in steps))
        values = {
            key: value
            for key, value in values.items()
            if key in passed or (key.startswith("GITHUB_") and key != "GITHUB_TOKEN")
        }
        values |= {"GITHUB_OUTPUT": str(folder / "output"), "GITHUB_STEP_SUMMARY": str(folder / "summary")}
        if event is not None:
            (folder / "event.json").write_text(json.dumps(event))
            values["GITHUB_EVENT_PATH"] = str(folder / "event.json")
        # Nor may it do what the workflow's permissions do not allow its tokens.
        hub.granted = {
            TOKEN: granted_by([step.permissions for step in steps]),
            APP_TOKEN: granted_by([step.app_permissions for step in steps]),
        }
        try:
            with monkeypatch.context() as patch:
                for key, value in values.items():
                    patch.setenv(key, value)
                code = main(["bot", name, *args])
        finally:
            hub.granted = None
        text = (folder / "output").read_text() if (folder / "output").exists() else ""
        outputs = dict(line.partition("=")[::2] for line in text.splitlines())
        outputs["summary"] = (folder / "summary").read_text() if (folder / "summary").exists() else ""
        return code, outputs

    return run


def comment_event(hub: GitHub, number: int, body: str, login: str, **sender: Any) -> dict[str, Any]:
    """The payload of a created comment, which also exists on the server."""
    comment = hub.comment(number, body, login=login)
    return {
        "action": "created",
        "issue": {"number": number, "pull_request": {"url": "https://example.invalid"}},
        "comment": comment,
        "sender": {**comment["user"], **sender},
        "repository": {"default_branch": "main", "full_name": REPO},
    }

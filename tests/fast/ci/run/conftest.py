"""A stub driver library, and a repository in a temporary folder that the real command line runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles_ci.run import runner
from tests.fast.ci.helpers.lean import LEAN_PYTEST

HERE = Path(__file__).parent
PACKAGE_PARENT = Path(runner.__file__).resolve().parents[2]
LIBRARIES = ("libcuda.so.1", "libamdhip64.so", "libnvidia-ml.so.1")


@pytest.fixture(scope="session")
def stub_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for LD_LIBRARY_PATH with the stub under the names of all three drivers."""
    folder = tmp_path_factory.mktemp("driver")
    source = HERE / "helpers" / "stub_driver.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(folder / LIBRARIES[0]), str(source)], check=True)
    for name in LIBRARIES[1:]:
        (folder / name).symlink_to(folder / LIBRARIES[0])
    return folder


@pytest.fixture
def stub_env(stub_libraries: Path) -> Callable[..., dict[str, str]]:
    """An environment in which driver calls reach the stub; keywords become STUB_ variables."""

    def make(**settings: object) -> dict[str, str]:
        hidden = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        env.update({f"STUB_{name.upper()}": str(value) for name, value in settings.items()})
        return {**env, "LD_LIBRARY_PATH": str(stub_libraries)}

    return make


REGISTRY = """
version: 1
hardware:
  cpu: {vendor: cpu, arch: cpu}
  h200: {vendor: nvidia, arch: hopper, sm: 90, memory_gib: 139, capabilities: [bf16, fp8]}
pools:
  box: {hardware: h200, labels: [self-hosted, h200], gpus_per_runner: 8, count: 1}
suites:
  stage-a-cpu: {tier: a, backend: cpu, hardware: [cpu], runs_on: [ubuntu-24.04], target_wall_s: 300, max_shards: 4,
                timeout_s: 600, test_timeout_s: 300, owner: ci}
  gpu: {tier: b, backend: cuda, hardware: [h200], gpus: 8, pools: [box], target_wall_s: 900, max_shards: 4,
        timeout_s: 1200, test_timeout_s: 300, owner: ci}
labels:
  domain: {kernels: {description: kernels, owner: ci}}
cadences:
  regular: {admit_nightly: false, include: requested, bypass_fastfail: false, write_baseline: false, arches: home}
  nightly: {crons: ["0 15 * * 0-5"], admit_nightly: true, include: all, bypass_fastfail: true, write_baseline: true,
            arches: home}
  weekly: {crons: ["0 15 * * 6"], admit_nightly: true, include: all, bypass_fastfail: true, write_baseline: true,
           arches: home}
  release: {admit_nightly: true, include: all, bypass_fastfail: true, write_baseline: false, arches: all}
selection: {inert: [], edges: []}
retry:
  device-lost: {kind: infra, where: [exception, log_tail], pattern: 'CUDA error:? 802', action: stop_host, strong: true}
  connection-reset: {kind: infra, where: [exception, log_tail], pattern: 'Connection reset by peer', action: retry,
                     max_attempts: 2}
  host-oom: {kind: infra, where: [exit], pattern: '137', action: retry, max_attempts: 2}
"""


@dataclass
class Outcome:
    """What one `miles-ci run` left behind."""

    code: int
    output: str
    folder: Path

    def results(self) -> dict[str, Any]:
        (path,) = self.folder.glob("*/results.json")  # those of repetitions lie deeper
        return json.loads(path.read_text())

    def tests(self) -> dict[str, dict[str, Any]]:
        return {Path(test["path"]).name: test for test in self.results()["tests"]}

    def outcomes(self) -> dict[str, str]:
        return {name: test["outcome"] for name, test in self.tests().items()}


class Repository:
    """Test files in a folder of their own, run by the real program in a real process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "registry.yaml").write_text(REGISTRY)
        (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n')

    def file(self, name: str, source: str, folder: str = "tests/fast") -> str:
        path = self.root / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return f"{folder}/{name}"

    def gpu_file(self, name: str, source: str, *, gpus: int = 1, est: float = 10, **fields: object) -> str:
        extra = "".join(f", {key}={value!r}" for key, value in fields.items())
        declared = (
            "from miles_ci.declare import register_metric_bound, register_cuda_ci\n"
            f"register_cuda_ci(est_time={est}, suite='gpu', hardware=['h200'], num_gpus={gpus}, labels=['kernels']{extra})\n"
        )
        return self.file(name, declared + textwrap.dedent(source), "tests/fast-gpu")

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "miles_ci", *words]

    def environment(self, base: dict[str, str] | None = None, **extra: str) -> dict[str, str]:
        ours = {name: value for name, value in (base or dict(os.environ)).items() if not name.startswith("MILES_CI_")}
        github = ("GITHUB_", "RUNNER_", "PYTEST_")
        clean = {name: value for name, value in ours.items() if not name.startswith(github)}
        folders = {
            "MILES_CI_LOCK_DIR": str(self.root / "locks"),
            "MILES_CI_RESULTS_DIR": str(self.root / "out"),
            "PYTHONPATH": str(PACKAGE_PARENT),
            **LEAN_PYTEST,
        }
        return {**clean, **folders, **extra}

    def run(self, *words: str, base: dict[str, str] | None = None, **extra: str) -> Outcome:
        done = subprocess.run(
            self.command("run", *words),
            cwd=self.root,
            env=self.environment(base, **extra),
            capture_output=True,
            text=True,
            timeout=110,
        )
        return Outcome(done.returncode, done.stdout + done.stderr, self.root / "out")

    def start(self, *words: str, base: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """A runner that goes on by itself; the test ends it."""
        return subprocess.Popen(
            self.command("run", *words),
            cwd=self.root,
            env=self.environment(base),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@pytest.fixture(scope="session")
def repository_class() -> type[Repository]:
    return Repository


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)

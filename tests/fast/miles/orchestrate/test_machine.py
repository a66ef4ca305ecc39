"""What the doctor says of a machine, and the Ray folders that killed runs leave."""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from miles.orchestrate import cluster, doctor
from miles.orchestrate.cluster import PREFIX, local_cluster
from miles.orchestrate.doctor import abilities
from miles.orchestrate.errors import RunError
from miles.orchestrate.placement import ClusterFacts, NodeFacts
from miles.orchestrate.process_mark import VARIABLE
from miles.orchestrate.stop_signals import STOP_SIGNALS

CORE = {"torch": "2", "ray": "2", "megatron-core": "0.16", "safetensors": "0.8"}


def verdicts(versions: dict[str, str | None], gpus: list[str]) -> dict[str, tuple[bool, str]]:
    return {ability.name: (ability.works, ability.reason) for ability in abilities(versions, gpus)}


def test_bare_cpu_machine_trains_on_cpu_and_says_why_not_on_gpu() -> None:
    found = verdicts(CORE, [])
    assert found["train on CPU (embedded engine, gloo)"][0] is True
    assert found["train on GPU (local spec)"] == (False, "no GPU is visible")
    assert found["SGLang rollout engine"] == (False, "sglang is not installed")


def test_missing_library_is_named_and_stops_training_everywhere() -> None:
    found = verdicts({**CORE, "ray": None, "megatron-core": None}, ["H200"])
    assert found["train on CPU (embedded engine, gloo)"] == (False, "missing: ray, megatron-core")
    assert found["train on GPU (local spec)"] == (False, "missing: ray, megatron-core")


def test_gpu_machine_trains_and_transformer_engine_is_told_apart() -> None:
    found = verdicts(CORE, ["H200", "H200"])
    assert found["train on GPU (local spec)"] == (True, "2 x H200")
    assert found["train on GPU with Transformer Engine"] == (False, "transformer-engine is not installed")
    with_engine = verdicts({**CORE, "transformer-engine": "2", "sglang": "0.5"}, ["H200"])
    assert with_engine["train on GPU with Transformer Engine"] == (True, "installed")
    assert with_engine["SGLang rollout engine"] == (True, "version 0.5")


def test_report_shows_machine_libraries_and_abilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpu_names", lambda: ["Imaginary 9000"])
    monkeypatch.setattr(doctor, "version_of", lambda package: None if package == "sglang" else "1.2.3")
    out = io.StringIO()
    doctor.report(Console(file=out, width=120))
    for said in ("cores", "memory", "free disk here", "Imaginary 9000", "1.2.3", "not installed", "yes  train on GPU"):
        assert said in out.getvalue()


def test_report_shows_the_cluster_that_runs_would_be_placed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert doctor.cluster_lines() == [("cluster", "one of each run's own, on this machine (no RAY_ADDRESS)")]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    nodes = (NodeFacts("a", "10.0.0.1", 8, 4, 3 << 30), NodeFacts("b", "10.0.0.2", 8, 0, 1 << 29))
    monkeypatch.setattr(doctor, "known_facts", lambda config: ClusterFacts(nodes, "b"))
    assert doctor.cluster_lines() == [
        ("cluster", "10.0.0.1:6379: 2 nodes"),
        ("node 10.0.0.1", "8 CPUs, 4 GPUs, 3.0 GiB"),
        ("node 10.0.0.2", "8 CPUs, 0 GPUs, 0.5 GiB (this machine)"),
    ]
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    ((_, said),) = doctor.cluster_lines()
    assert said.startswith("cannot be used: environment variable RAY_ADDRESS: 'nonsense' is no address")


def test_version_of_a_package_that_is_not_there_is_none() -> None:
    assert doctor.version_of("no-such-package-at-all") is None


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Records `init` and `shutdown`; Ray's folders go below the test's own."""
    calls: list[Any] = []
    fake = SimpleNamespace(init=lambda **options: calls.append(options), shutdown=lambda: calls.append("shutdown"))
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Test folders have long paths, and no real Ray puts sockets there.
    monkeypatch.setattr(cluster, "LONGEST_BASE", 4096)
    return calls


def test_cluster_has_its_own_folder_and_no_dashboard_and_removes_it(fake_ray: list[Any]) -> None:
    with local_cluster(cpus=3) as cluster:
        options = fake_ray[0]
        assert cluster.folder.is_dir()
        assert options["_temp_dir"] == str(cluster.folder / "r")
        assert stat.S_IMODE(cluster.folder.stat().st_mode) == 0o700
        assert options["_node_ip_address"] == "127.0.0.1"
        assert (options["address"], options["num_cpus"], options["include_dashboard"]) == ("local", 3, False)
    assert fake_ray[1:] == ["shutdown"]
    assert not cluster.folder.exists()


def test_failed_start_stops_ray_and_removes_the_folder(fake_ray: list[Any], tmp_path: Path, monkeypatch) -> None:
    def fail(**_: Any) -> None:
        raise OSError("no shared memory")

    monkeypatch.setattr(sys.modules["ray"], "init", fail)
    with pytest.raises(RunError, match="did not start: no shared memory"):
        with local_cluster(cpus=1):
            pass
    assert fake_ray == ["shutdown"]
    assert [path.name for path in tmp_path.iterdir()] == [f"miles-start-{os.getuid()}.lock"]


def test_folders_of_killed_runs_are_removed_and_those_of_living_ones_stay(fake_ray: list[Any], tmp_path: Path) -> None:
    for name in ("dead", "alive"):
        folder = tmp_path / f"{PREFIX}{name}"
        folder.mkdir()
        (folder / "lock").touch()
    other = tmp_path / "somebody-elses"
    other.mkdir()
    with (tmp_path / f"{PREFIX}alive" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with local_cluster(cpus=1):
            pass
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        f"{PREFIX}alive",
        f"miles-start-{os.getuid()}.lock",
        "somebody-elses",
    ]


def test_a_long_temporary_folder_leaves_room_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 60)
    assert cluster._base() == "/tmp"
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/short")
    assert cluster._base() == "/tmp/short"


def test_a_cluster_that_does_not_start_says_why_with_the_daemons_last_words(
    fake_ray: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: Any) -> None:
        logs = Path(options["_temp_dir"]) / "session_1" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text("started\nout of memory\n")
        raise Exception("The current node timed out during startup.\nsecond line")

    monkeypatch.setattr(sys.modules["ray"], "init", init)
    with pytest.raises(RunError, match=r"did not start: The current node timed out.*raylet\.err: out of memory.*again"):
        with local_cluster(cpus=1):
            pass
    assert list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")) == []


def test_ray_lives_in_one_thread_that_stays_as_long_as_the_cluster(
    fake_ray: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux kills the daemons with the thread that started them."""
    threads: list[threading.Thread] = []
    for name in ("init", "shutdown"):
        monkeypatch.setattr(sys.modules["ray"], name, lambda **_: threads.append(threading.current_thread()))
    with local_cluster(cpus=1):
        assert threads[0].is_alive()
        assert threads[0] is not threading.main_thread()
    assert threads == [threads[0]] * 2
    threads[0].join(10)
    assert not threads[0].is_alive()


SIGTERM_ENDS_IT = ctypes.CDLL(None).signal
SIGTERM_ENDS_IT.argtypes, SIGTERM_ENDS_IT.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p


def test_ray_does_not_keep_the_signal_that_it_takes_behind_pythons_back(fake_ray: list[Any], monkeypatch) -> None:
    got: list[int] = []
    # As its core worker: the default action (0), set in C.
    monkeypatch.setattr(sys.modules["ray"], "init", lambda **_: SIGTERM_ENDS_IT(signal.SIGTERM, 0))
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with local_cluster(cpus=1):
            signal.raise_signal(signal.SIGTERM)
            assert got == [signal.SIGTERM]
            assert {signal.getsignal(number) for number in STOP_SIGNALS} != {signal.SIG_IGN}
        signal.raise_signal(signal.SIGTERM)
        assert got == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_stop_signal_while_ray_hangs_in_its_start_is_an_interruption(
    fake_ray: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(**_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(sys.modules["ray"], "init", hang)
    monkeypatch.setattr(cluster, "SHUTDOWN_WAIT_S", 0.2)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        with local_cluster(cpus=1):
            pass
    assert time.monotonic() - started < 30
    assert list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")) == []


def test_a_start_that_never_returns_is_given_up(fake_ray: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["ray"], "init", lambda **_: time.sleep(60))
    monkeypatch.setattr(cluster, "START_LIMIT_S", 0.2)
    monkeypatch.setattr(cluster, "SHUTDOWN_WAIT_S", 0.2)
    with pytest.raises(RunError, match=r"did not start: nothing answered for 0\.2 s; this machine is"):
        with local_cluster(cpus=1):
            pass


def test_a_ray_that_ends_the_process_in_its_start_is_an_error(fake_ray: list[Any], monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["ray"], "init", lambda **_: sys.exit(1))
    with pytest.raises(RunError, match="did not start: Ray ended the process with 1"):
        with local_cluster(cpus=1):
            pass


def test_folders_that_were_written_again_after_their_removal_go_too(fake_ray: list[Any], tmp_path: Path) -> None:
    old, new = tmp_path / f"{PREFIX}old", tmp_path / f"{PREFIX}new"
    for folder in (old, new):
        folder.mkdir()
    past = time.time() - 2 * cluster.UNLOCKED_AGE_S
    os.utime(old, (past, past))
    with local_cluster(cpus=1):
        assert not old.exists()
        assert new.exists()


def test_callers_need_a_token_of_this_run(fake_ray: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with local_cluster(cpus=1):
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_a_slow_start_of_a_busy_machine_is_told_from_a_failure(
    fake_ray: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(sys.modules["ray"], "init", fail)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, said in (
        (23.9, r"machine is busy \(23\.9 runnable processes on 2 processors\)"),
        (0.5, "a process failed"),
    ):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        with pytest.raises(RunError, match=said):
            with local_cluster(cpus=1):
                pass


def test_what_the_run_starts_has_its_mark_and_nothing_else_keeps_it(fake_ray: list[Any]) -> None:
    before = os.environ.get(VARIABLE)
    with local_cluster(cpus=1):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        first = os.environ[VARIABLE]
        assert len(first) == 32
    assert child.wait(5) == -signal.SIGKILL
    assert os.environ.get(VARIABLE) == before
    with local_cluster(cpus=1):
        assert os.environ[VARIABLE] != first


def test_a_shutdown_that_waits_for_ever_is_not_waited_for(fake_ray: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    unregistered: list[Any] = []
    monkeypatch.setattr(sys.modules["ray"], "shutdown", lambda: time.sleep(60))
    monkeypatch.setattr(cluster, "SHUTDOWN_WAIT_S", 0.2)
    monkeypatch.setattr(cluster.atexit, "unregister", unregistered.append)
    started = time.monotonic()
    with local_cluster(cpus=1) as running:
        pass
    assert time.monotonic() - started < 20
    assert unregistered == [sys.modules["ray"].shutdown]
    assert not running.folder.exists()


def test_a_shutdown_that_waits_for_a_process_of_the_run_is_helped(fake_ray: list[Any], monkeypatch) -> None:
    monkeypatch.setattr(cluster.SweeperHandle, "stopping", lambda handle: child.kill())
    monkeypatch.setattr(cluster, "SHUTDOWN_WAIT_S", 90)
    with local_cluster(cpus=1):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        monkeypatch.setattr(sys.modules["ray"], "shutdown", lambda: fake_ray.append(child.wait()))
    assert fake_ray[1:] == [-signal.SIGKILL]


def test_the_start_waits_for_another_run_and_says_so(fake_ray: list[Any], tmp_path: Path) -> None:
    code = (
        "import sys, time; from miles.orchestrate.start_turn import *; from pathlib import Path\n"
        "with start_turn(lock_path(sys.argv[1]), print):\n print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        assert not [call for call in fake_ray if isinstance(call, dict)]
        other.kill()  # and with it its lock

    with local_cluster(cpus=1, note=note):
        assert len([call for call in fake_ray if isinstance(call, dict)]) == 1
    assert notes == [f"waiting for another run to start Ray (process {other.pid})"]
    other.wait()

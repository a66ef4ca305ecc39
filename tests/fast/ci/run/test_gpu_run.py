"""`miles-ci run` on a GPU suite with a stand-in driver: leases, health, occupied memory, metric bounds. No real device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from miles_ci.declare import scan
from miles_ci.history import store as stores
from miles_ci.history.records import TRUSTED, MetricIdentity, MetricValue

OK = "def test_a(): assert True\n"
SHOWS_ITS_DEVICES = """
    import json, os, pathlib, time
    def test_notes_what_it_sees():
        lease = json.loads(os.environ["MILES_CI_LEASE"])
        seen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(seen) == len(lease["devices"]) == %(gpus)d
        assert all(name.startswith("GPU-") for name in seen)
        start = time.time()
        time.sleep(0.3)
        record = {"devices": lease["devices"], "ports": lease["ports"], "from": start, "to": time.time()}
        pathlib.Path(__file__).with_suffix(".lease").write_text(json.dumps(record))
"""


def leases(root: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((root / "tests" / "fast-gpu").glob("*.lease"))]


def overlapping(records: list[dict]) -> list[tuple[dict, dict]]:
    pairs = [(a, b) for n, a in enumerate(records) for b in records[n + 1 :]]
    return [(a, b) for a, b in pairs if a["from"] < b["to"] and b["from"] < a["to"]]


def test_files_share_the_host_and_no_device(repository, stub_env):
    for number, gpus in enumerate((2, 1, 1)):
        repository.gpu_file(f"test_{number}.py", SHOWS_ITS_DEVICES % {"gpus": gpus}, gpus=gpus)
    outcome = repository.run("--suite", "gpu", base=stub_env(devices=2))
    assert set(outcome.outcomes().values()) == {"passed"}, outcome.output
    assert outcome.code == 0
    records = leases(repository.root)
    assert len(records) == 3
    for first, second in overlapping(records):
        assert not set(first["devices"]) & set(second["devices"])
        assert first["ports"] != second["ports"]
    assert len(outcome.results()["devices"]) == 2


def test_two_runner_processes_never_lease_one_device(repository, stub_env):
    for number in range(2):
        repository.gpu_file(f"test_{number}.py", SHOWS_ITS_DEVICES % {"gpus": 1}, gpus=1)
    files = [f"tests/fast-gpu/test_{number}.py" for number in range(2)]
    runners = []
    for half in (files[:1], files[1:]):
        words = ["run", "--suite", "gpu", "--results", str(repository.root / f"out-{half[0][-4]}")]
        for file in half:
            words += ["--file", file]
        env = repository.environment(stub_env(devices=2))
        runners.append(
            subprocess.Popen(
                repository.command(*words),
                cwd=repository.root,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    for runner in runners:
        output, _ = runner.communicate(timeout=100)
        assert runner.returncode == 0, output.decode()
    records = leases(repository.root)
    assert len(records) == 2
    for first, second in overlapping(records):
        assert not set(first["devices"]) & set(second["devices"])


def test_inherited_visibility_restricts_the_runner(repository, stub_env):
    repository.gpu_file("test_a.py", SHOWS_ITS_DEVICES % {"gpus": 1}, gpus=1)
    base = {**stub_env(devices=2), "CUDA_VISIBLE_DEVICES": "1"}
    outcome = repository.run("--suite", "gpu", base=base)
    assert outcome.code == 0, outcome.output
    assert leases(repository.root)[0]["devices"] == ["00000000:02:00.0"]
    repository.gpu_file("test_b.py", OK, gpus=2)
    outcome = repository.run("--suite", "gpu", base=base)
    assert outcome.code == 2
    assert "needs 2 device(s), this runner may use 1" in outcome.output


def test_error_802_stops_the_shard_and_no_further_test_is_taken(repository, stub_env):
    for number in range(3):
        repository.gpu_file(f"test_{number}.py", OK, gpus=2)
    outcome = repository.run("--suite", "gpu", base=stub_env(devices=2, fault="802"))
    assert outcome.code == 3
    assert sorted(outcome.outcomes().values()) == ["infra", "not_run", "not_run"]
    assert "gpu-unhealthy" in outcome.output
    assert any("gpu-unhealthy" in note for note in outcome.results()["notes"])


def test_error_802_inside_a_test_stops_the_shard_too(repository, stub_env):
    source = "def test_a(): raise RuntimeError('CUDA error 802: system not yet initialized')\n"
    repository.gpu_file("test_0.py", source, gpus=2, est=20)
    repository.gpu_file("test_1.py", OK, gpus=2)
    outcome = repository.run("--suite", "gpu", base=stub_env(devices=2))
    assert (outcome.code, outcome.outcomes()) == (3, {"test_0.py": "infra", "test_1.py": "not_run"})


def test_occupied_device_is_refused_and_the_user_named_and_left_alone(repository, stub_env):
    repository.gpu_file("test_0.py", OK)
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        base = stub_env(devices=2, free_mib=1000, user=bystander.pid)
        outcome = repository.run("--suite", "gpu", "--wait-memory", "0", base=base)
        assert outcome.code == 3
        message = outcome.tests()["test_0.py"]["message"]
        assert f"pid {bystander.pid}, 4096 MiB, sleep 60" in message
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_test_process_that_sees_other_devices_than_leased_is_stopped(repository, stub_env):
    """A start-up file that widens the visibility variables would let tests use devices of others."""
    repository.gpu_file("test_0.py", OK)
    widened = "import os\nif 'MILES_CI_LEASE' in os.environ:\n    os.environ['CUDA_VISIBLE_DEVICES'] = '0,1,2'\n"
    (repository.root / "site").mkdir()
    (repository.root / "site" / "sitecustomize.py").write_text(widened)
    extra = os.pathsep.join([str(repository.root / "site"), repository.environment()["PYTHONPATH"]])
    outcome = repository.run("--suite", "gpu", base=stub_env(devices=2), PYTHONPATH=extra)
    assert outcome.outcomes() == {"test_0.py": "infra"}, outcome.output
    assert "leased 1 device(s), the test process saw 3" in outcome.tests()["test_0.py"]["message"]


def test_devices_other_than_the_registry_promises_are_refused(repository, stub_env):
    repository.gpu_file("test_0.py", OK)
    other = repository.run("--suite", "gpu", base=stub_env(devices=2, model="H100"))
    assert other.code == 3
    assert "device 0 (NVIDIA H100) is not what suite 'gpu' needs: h200" in other.output
    text = (repository.root / "registry.yaml").read_text().replace("memory_gib: 139", "memory_gib: 200")
    (repository.root / "registry.yaml").write_text(text)
    smaller = repository.run("--suite", "gpu", base=stub_env(devices=2))
    assert smaller.code == 3
    assert "has 143000 MiB, but hardware.h200 promises 204800 MiB" in smaller.output


def test_machine_without_driver_is_an_infrastructure_failure(repository):
    repository.gpu_file("test_0.py", OK)
    outcome = repository.run("--suite", "gpu", LD_LIBRARY_PATH=str(repository.root))
    assert outcome.code == 3
    assert "devices of this host cannot be listed" in outcome.output


def test_cancel_by_ctrl_c_writes_what_is_known(repository, stub_env):
    source = "import time, pathlib\ndef test_a():\n    pathlib.Path(__file__).with_suffix('.on').touch()\n    time.sleep(60)\n    assert 1\n"
    repository.gpu_file("test_0.py", source, gpus=2, est=20)
    repository.gpu_file("test_1.py", OK, gpus=2)
    process = repository.start("--suite", "gpu", base=stub_env(devices=2))
    deadline = time.monotonic() + 40
    while not (repository.root / "tests" / "fast-gpu" / "test_0.on").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=15) == 130
    (path,) = (repository.root / "out").glob("*/results.json")
    tests = json.loads(path.read_text())["tests"]
    assert {test["outcome"] for test in tests} == {"cancelled"}
    assert len(tests) == 2


RECORDS = """
    import json, os, pathlib
    register_metric_bound("loss", abs_up=0.1, abs_down=0.1)
    def test_trains():
        folder = pathlib.Path(os.environ["MILES_CI_METRICS_DIR"])
        record = {"schema": 1, "metric": "loss", "series": [[1, 3.0], [2, %s]]}
        (folder / "m.jsonl").write_text(json.dumps(record) + "\\n")
        assert True
"""


def test_bound_decides_the_exit_code_of_a_passed_test(repository, stub_env):
    paths = [repository.gpu_file(f"test_{name}.py", RECORDS % value) for name, value in (("ok", 1.05), ("worse", 2.5))]
    address = f"sqlite:{repository.root}/history.db"
    store = stores.open_store(address)
    for bound in scan(repository.root).metric_bounds:
        identity = MetricIdentity(bound.path, "cuda", "gpu", "h200", 1, "loss", "last", bound.digest)
        store.record_values([MetricValue(identity, 1.0, f"r{n}", n, TRUSTED) for n in range(5)])
    outcome = repository.run("--suite", "gpu", base=stub_env(devices=2), MILES_CI_HISTORY_URL=address)
    assert outcome.code == 6
    assert outcome.outcomes() == {"test_ok.py": "passed", "test_worse.py": "passed"}
    verdicts = {Path(test["path"]).name: test["metrics"][0]["verdict"] for test in outcome.results()["tests"]}
    assert verdicts == {"test_ok.py": "pass", "test_worse.py": "fail"}
    assert "outside [0.9, 1.1]" in outcome.output
    # A pull request only reads: nothing was added to what stood there.
    assert [trusted + candidates for _, trusted, candidates in store.series()] == [5] * len(paths)
    store.close()


def test_nightly_of_the_default_branch_writes_candidates(repository, stub_env):
    path = repository.gpu_file("test_bounded.py", RECORDS % "1.05")
    address = f"sqlite:{repository.root}/history.db"
    github = {"GITHUB_EVENT_NAME": "schedule", "GITHUB_REF": "refs/heads/main", "GITHUB_RUN_ID": "77"}
    words = ("--suite", "gpu", "--cadence", "nightly")
    outcome = repository.run(*words, base=stub_env(devices=2), MILES_CI_HISTORY_URL=address, **github)
    assert outcome.code == 0, outcome.output
    store = stores.open_store(address)
    ((identity, trusted, candidates),) = store.series()
    assert (identity.test, trusted, candidates) == (path, 0, 1)
    assert list(store.passing_durations(hardware="h200", since=0)) == [("gpu", path)]
    store.close()

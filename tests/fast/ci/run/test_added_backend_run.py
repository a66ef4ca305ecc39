"""`miles-ci run` on a backend that the registry adds: the project's two commands stand where a driver would."""

from __future__ import annotations

import json
import textwrap

import pytest

from tests.fast.ci.run.conftest import REGISTRY, Repository

ADDED = REGISTRY.replace(
    "hardware:\n",
    """backends:
  npu: {vendor: acme, architectures: [a2], visible: ACME_VISIBLE, devices: [python3, acme.py, devices],
        health: [python3, acme.py, health], workflow: own}
hardware:
  a2x: {vendor: acme, arch: a2, memory_gib: 60, capabilities: [bf16]}
""",
    1,
).replace(
    "suites:\n",
    """  acme: {hardware: a2x, labels: [self-hosted, acme], gpus_per_runner: 2, count: 1}
suites:
  npu: {tier: b, backend: npu, hardware: [a2x], gpus: 2, pools: [acme], target_wall_s: 900, max_shards: 4,
        timeout_s: 1200, test_timeout_s: 300, owner: ci}
""",
    1,
)
# Bus ids in falling order: an index means the place in this list, whatever the ids sort like.
ACME = """
    import json, os, sys
    entry = {"name": "Acme A2X", "total_mib": 61440, "free_mib": 61440, "processes": []}
    if sys.argv[1] == "devices":
        print(json.dumps({"devices": [{**entry, "bus_id": f"slot-{9 - n}", "uuid": f"u{n}"} for n in range(2)]}))
    else:
        print(json.dumps({"ok": True, "devices": len(os.environ["ACME_VISIBLE"].split(","))}))
"""
TEST = """
    from miles_ci.declare import register_npu_ci
    register_npu_ci(10, "npu", hardware=["a2x"], num_gpus=%(gpus)d, labels=["kernels"])
    import json, os, pathlib
    def test_sees_its_lease():
        lease = json.loads(os.environ["MILES_CI_LEASE"])
        seen = [int(word) for word in os.environ["ACME_VISIBLE"].split(",")]
        assert lease["backend"] == "npu"
        assert [f"slot-{9 - index}" for index in seen] == lease["devices"]
        assert len(seen) == %(gpus)d
        assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["HIP_VISIBLE_DEVICES"] == ""
"""


@pytest.fixture
def acme(tmp_path) -> Repository:
    made = Repository(tmp_path)
    (tmp_path / "registry.yaml").write_text(ADDED)
    (tmp_path / "acme.py").write_text(textwrap.dedent(ACME))
    made.file("test_a.py", "def test_a(): assert True\n")
    return made


def test_each_file_sees_exactly_the_devices_of_its_lease(acme: Repository) -> None:
    for gpus in (1, 2):
        acme.file(f"test_{gpus}.py", TEST % {"gpus": gpus}, "tests/npu")
    outcome = acme.run("--suite", "npu")
    assert outcome.outcomes() == {"test_1.py": "passed", "test_2.py": "passed"}, outcome.output
    assert outcome.code == 0


def test_an_inherited_variable_restricts_the_set(acme: Repository) -> None:
    acme.file("test_1.py", TEST % {"gpus": 1}, "tests/npu")
    outcome = acme.run("--suite", "npu", ACME_VISIBLE="1")
    assert outcome.outcomes() == {"test_1.py": "passed"}, outcome.output
    assert [device["bus_id"] for device in outcome.results()["devices"]] == ["slot-8"]


@pytest.mark.parametrize(
    ("health", "said"),
    [
        ('print(json.dumps({"ok": False, "error": "firmware 3 is too old"}))', "firmware 3 is too old"),
        ('print(json.dumps({"ok": True, "devices": 2}))', "1 device(s) were leased, 2 are visible"),
        ('print("[]")', "it printed no JSON object"),
        ("sys.exit(3)", "exit code 3"),
        ('print(json.dumps({"ok": True, "devices": True}))', "no count"),
    ],
)
def test_an_unhealthy_device_stops_the_shard(acme: Repository, health: str, said: str) -> None:
    source = textwrap.dedent(ACME).rpartition("    print(")[0]
    (acme.root / "acme.py").write_text(source + "    " + health + "\n")
    acme.file("test_1.py", TEST % {"gpus": 1}, "tests/npu")
    outcome = acme.run("--suite", "npu")
    assert outcome.outcomes() == {"test_1.py": "infra"}, outcome.output
    assert said in json.dumps(outcome.results())
    assert outcome.code == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bus_id": "../../x"}, "devices[0].bus_id"),
        ({"total_mib": "61440"}, "devices[0].total_mib"),
        ({"free_mib": -1}, "devices[0].free_mib"),
        ({"processes": [{"pid": "1"}]}, "devices[0].processes"),
        ({"name": ""}, "devices[0].name"),
        ({"name": "Acme B1"}, "is not what suite 'npu' needs"),
        ({"total_mib": 1000}, "promises 61440 MiB"),
    ],
)
def test_an_answer_that_cannot_be_true_ends_the_run_with_its_place(acme: Repository, change: dict, said: str) -> None:
    entry = {"bus_id": "a", "uuid": "u", "name": "Acme A2X", "total_mib": 61440, "free_mib": 61440, "processes": []}
    answer = json.dumps({"devices": [{**entry, **change}]})
    (acme.root / "acme.py").write_text(f"print({answer!r})\n")
    acme.file("test_1.py", TEST % {"gpus": 1}, "tests/npu")
    outcome = acme.run("--suite", "npu")
    assert said in outcome.output
    assert outcome.code == 3

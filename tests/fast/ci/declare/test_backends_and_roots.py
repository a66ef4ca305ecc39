"""Backends and test roots that a project adds in its registry; names and folders that are nobody's."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_ci import declare
from miles_ci.declare.reader import read_source
from miles_ci.declare.tree import scan_tree
from miles_ci.declare.vocabulary import SHIPPED_BACKENDS, Vocabulary
from miles_ci.errors import ConfigErrors
from miles_ci.lint import lint
from miles_ci.registry.model import VENDOR_OF_BACKEND
from tests.fast.ci.helpers.trees import PLAIN, REPOSITORY, cpu, workspace, write_tree

NPU = """
backends:
  npu: {vendor: acme, architectures: [a2], visible: ACME_VISIBLE, devices: [acme-smi], health: [acme-check], workflow: own}
hardware:
  a2x: {vendor: acme, arch: a2, memory_gib: 60, capabilities: [bf16]}
"""
SUITE = """
suites:
  npu-1: {tier: b, backend: npu, hardware: [a2x], gpus: 1, pools: [acme-1], needs: stage-a-cpu, target_wall_s: 900, max_shards: 2, timeout_s: 1800, test_timeout_s: 900, owner: ci}
"""
POOL = "\npools:\n  acme-1: {hardware: a2x, labels: [self-hosted, acme], gpus_per_runner: 1, count: 1}\n"
ON_NPU = (
    "from miles_ci.declare import register_npu_ci\n"
    'register_npu_ci(60, "npu-1", hardware=["a2x"], num_gpus=1, labels=["kernels"])\n'
    "def test_it():\n    assert True\n"
)


def registry(*, roots: str | None = None, npu: bool = False) -> str:
    text = (REPOSITORY / "registry.yaml").read_text(encoding="utf-8")
    if npu:
        for added in (NPU, POOL, SUITE):
            section = added.strip("\n").rpartition("\n  ")[0].rpartition("\n")[2]
            head, entry = added.strip("\n").rsplit("\n", 1)
            before = head.removesuffix(section)
            text = text.replace(f"\n{section}\n", f"\n{before}{section}\n{entry}\n", 1)
    return text if roots is None else text + f"roots: {roots}\n"


def errors(root: Path) -> list[tuple[str, str]]:
    return [(item.path, item.code) for item in lint(workspace(root)).errors if item.code != "schema-drift"]


def test_the_reader_and_the_registry_agree_on_the_backends_that_are_always_there() -> None:
    assert set(SHIPPED_BACKENDS) == set(VENDOR_OF_BACKEND)


@pytest.mark.parametrize(
    ("call", "near"),
    [
        ("register_cdua_ci", "did you mean 'register_cuda_ci'?"),
        ("register_npu_ci", "did you mean 'register_cpu_ci'?"),
        ("register_habana_ci", "valid: register_cpu_ci, register_cuda_ci, register_metric_bound, register_rocm_ci"),
        ("register_cuda_cii", "did you mean 'register_cuda_ci'?"),
        ("regster_cuda_ci", "did you mean 'register_cuda_ci'?"),
        ("register_metric_bounds", "did you mean 'register_metric_bound'?"),
    ],
)
@pytest.mark.parametrize("form", ["{}(1, 's')", "shim.{}(1, 's')", "if True:\n    {}(1, 's')", "X = {}(1, 's')"])
def test_a_registration_that_no_backend_has_is_an_error_beside_a_valid_one(call: str, near: str, form: str) -> None:
    source = f"import shim\nfrom shim import {call}\n{cpu()}{form.format(call)}\n"
    found = read_source("tests/e2e/test_x.py", source.encode())
    assert [item.code for item in found.errors] == ["unknown-registration"]
    assert near in found.errors[0].message


@pytest.mark.parametrize("line", ["again = register_npu_ci", "from shim import register_npu_ci as again"])
def test_an_unknown_registration_cannot_hide_behind_another_name(line: str) -> None:
    assert read_source("tests/e2e/test_x.py", f"{cpu()}{line}\nagain(1)\n".encode()).errors


@pytest.mark.parametrize("line", ["register(1, 's')", "register_model(1)", "registry_of_ci()", "self.register_hook(f)"])
def test_other_functions_called_register_are_left_alone(line: str) -> None:
    assert read_source("tests/e2e/test_x.py", f"{cpu()}def helper():\n    {line}\n".encode()).errors == ()


def test_an_added_backend_has_its_function_and_it_does_nothing() -> None:
    name = "register_npu_ci"  # written out, it would be a registration of this file, for a backend that we lack
    register = getattr(declare, name)
    assert register(60, "npu-1", hardware=["a2x"]) is None
    with pytest.raises(AttributeError, match="register_npu"):
        declare.register_npu  # noqa: B018
    with pytest.raises(TypeError):
        register(60, "npu-1", hardwar=["a2x"])


def test_the_scan_knows_an_added_backend_from_the_registry(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/e2e/test_n.py": ON_NPU, "tests/fast/test_a.py": PLAIN}, registry=registry(npu=True))
    assert errors(tmp_path) == []
    (item,) = [item for item in workspace(tmp_path).catalog.registrations if item.backend == "npu"]
    assert (item.path, item.suite, item.num_gpus) == ("tests/e2e/test_n.py", "npu-1", 1)


def test_without_the_backend_in_the_registry_the_same_file_is_an_error(tmp_path: Path) -> None:
    cached = tmp_path / "cache"
    write_tree(tmp_path, {"tests/e2e/test_n.py": ON_NPU})
    assert scan_tree(tmp_path, vocabulary=Vocabulary.adding(["npu"]), cache_dir=cached).errors == ()
    # What the cache knows of the content under other backends does not count.
    codes = {item.code for item in scan_tree(tmp_path, cache_dir=cached).errors}
    assert codes == {"unknown-import", "unknown-registration"}


def test_a_declaration_for_an_added_backend_is_held_to_the_rules_of_devices(tmp_path: Path) -> None:
    broken = ON_NPU.replace('hardware=["a2x"], ', "").replace("labels", "lables")
    write_tree(tmp_path, {"tests/e2e/test_n.py": broken, "tests/fast/test_a.py": PLAIN}, registry=registry(npu=True))
    assert sorted(errors(tmp_path)) == [
        ("tests/e2e/test_n.py", "missing-field"),
        ("tests/e2e/test_n.py", "unknown-field"),
    ]


def test_tests_lie_in_every_root_and_fast_of_each_is_implicit(tmp_path: Path) -> None:
    files = {"checks/fast/test_a.py": PLAIN, "checks/test_b.py": cpu(), "src/p/tests/fast/test_c.py": PLAIN}
    write_tree(
        tmp_path, {**files, "tests/e2e/test_ignored.py": PLAIN}, registry=registry(roots="[checks, src/p/tests]")
    )
    assert errors(tmp_path) == []
    found = {(item.path, item.suite) for item in workspace(tmp_path).catalog.registrations}
    assert found == {
        ("checks/fast/test_a.py", "stage-a-cpu"),
        ("checks/test_b.py", "stage-b-cpu"),
        ("src/p/tests/fast/test_c.py", "stage-a-cpu"),
    }
    assert workspace(tmp_path).table == "checks/durations.json"


def test_a_test_in_an_added_root_must_declare_too(tmp_path: Path) -> None:
    write_tree(
        tmp_path, {"checks/test_b.py": PLAIN, "checks/breakfast/test_c.py": PLAIN}, registry=registry(roots="[checks]")
    )
    assert errors(tmp_path) == [("checks/breakfast/test_c.py", "not-declared"), ("checks/test_b.py", "not-declared")]


@pytest.mark.parametrize(
    ("files", "roots", "words"),
    [
        ({}, None, "'tests' no such folder"),
        ({"tests/conftest.py": "", "tests/tool.py": ""}, None, "'tests' holds no test file"),
        ({"tests/fast/test_a.py": PLAIN}, "[tests, chekcs]", "'chekcs' no such folder"),
        ({"tests/fast/test_a.py": PLAIN, "checks/a.txt": ""}, "[tests, checks]", "'checks' holds no test file"),
    ],
)
def test_a_root_without_a_test_is_an_error_for_every_command(tmp_path: Path, files, roots, words: str) -> None:
    write_tree(tmp_path, files, registry=registry(roots=roots))
    assert [item for item in errors(tmp_path) if item[1] == "no-test-files"] == [("registry.yaml", "no-test-files")]
    with pytest.raises(ConfigErrors, match="no-test-files") as raised:
        _ = workspace(tmp_path).catalog
    assert words in str(raised.value)


def test_a_root_behind_a_link_is_not_followed_and_said_so(tmp_path: Path) -> None:
    write_tree(tmp_path, {"real/fast/test_a.py": PLAIN}, registry=registry(roots="[linked]"))
    (tmp_path / "linked").symlink_to("real")
    with pytest.raises(ConfigErrors, match="symbolic link"):
        _ = workspace(tmp_path).catalog


def test_the_place_of_an_empty_root_is_its_entry(tmp_path: Path) -> None:
    text = registry(roots="[tests, checks]")
    write_tree(tmp_path, {"tests/fast/test_a.py": PLAIN}, registry=text)
    (found,) = workspace(tmp_path).without_tests
    assert text.splitlines()[found.line - 1][found.column - 1 :].startswith("checks")


def test_with_a_broken_registry_its_own_roots_and_backends_still_hold(tmp_path: Path) -> None:
    text = registry(roots="[checks, 7]", npu=True).replace("version: 1", "version: 9")
    write_tree(tmp_path, {"checks/test_n.py": ON_NPU.replace("60", "True"), "tests/test_x.py": PLAIN}, registry=text)
    found = errors(tmp_path)
    assert ("checks/test_n.py", "wrong-type") in found
    assert {path for path, _ in found} == {"checks/test_n.py", "registry.yaml"}


def test_nothing_below_a_root_is_inert(tmp_path: Path) -> None:
    write_tree(tmp_path, {"checks/fast/test_a.py": PLAIN}, registry=registry(roots="[checks]"))
    assert "checks" in workspace(tmp_path).fleet.selection_rules().code

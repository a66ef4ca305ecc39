"""Scanning a tree: which files count, the cache, and that one faulty file never hides another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_ci.declare import cache as cache_module
from miles_ci.declare.cache import FILE_NAME
from miles_ci.declare.tree import scan_tree
from tests.fast.ci.helpers.trees import PLAIN, cpu, cuda, write_tree


def errors_of(found) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for error in found.errors:
        result.setdefault(error.path, []).append(error.code)
    return result


def test_tests_fast_is_implicit_and_everything_else_must_declare(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/fast/a/test_a.py": PLAIN, "tests/e2e/test_b.py": PLAIN, "tests/rocm/test_c.py": cpu()})
    found = scan_tree(tmp_path)
    assert [(item.path, item.suite, item.implicit) for item in found.declarations] == [
        ("tests/fast/a/test_a.py", "stage-a-cpu", True),
        ("tests/rocm/test_c.py", "stage-b-cpu", False),
    ]
    assert errors_of(found) == {"tests/e2e/test_b.py": ["not-declared"]}


def test_an_explicit_declaration_under_tests_fast_replaces_the_implicit_one(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/fast/test_a.py": cpu(), "tests/fast/test_b.py": cuda()})
    assert [item.suite for item in scan_tree(tmp_path).declarations] == ["stage-b-cpu", "stage-b-1-gpu-h200"]


def test_tests_in_a_file_that_pytest_would_not_collect_are_errors(tmp_path: Path) -> None:
    method = "class TestX:\n    def test_y(self):\n        pass\n"
    write_tree(
        tmp_path,
        {"tests/fast/x_test.py": PLAIN, "tests/fast/cases.py": method, "tests/fast/tool.py": "def f(): pass\n"},
    )
    assert errors_of(scan_tree(tmp_path)) == {
        "tests/fast/cases.py": ["misplaced-test"],
        "tests/fast/x_test.py": ["misplaced-test"],
    }


def test_a_declaration_in_a_file_that_is_no_test_is_an_error(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/fast/tool.py": cpu().replace("def test_it", "def it")})
    assert errors_of(scan_tree(tmp_path)) == {"tests/fast/tool.py": ["misplaced-declaration"]}


def test_conftest_and_helpers_are_exempt(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {"tests/conftest.py": PLAIN, "tests/fast/helpers/like.py": PLAIN, "tests/fast/helpers/deep/x_test.py": PLAIN},
    )
    found = scan_tree(tmp_path)
    assert (found.declarations, found.errors, found.files) == ((), (), ())


def test_what_pytest_would_run_below_helpers_counts_as_anywhere_else(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/fast/helpers/deep/test_h.py": PLAIN, "tests/e2e/helpers/test_h.py": PLAIN})
    found = scan_tree(tmp_path)
    assert [item.path for item in found.declarations] == ["tests/fast/helpers/deep/test_h.py"]
    assert errors_of(found) == {"tests/e2e/helpers/test_h.py": ["not-declared"]}


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/fast/test_a.py": PLAIN, "elsewhere/test_b.py": PLAIN})
    (tmp_path / "tests/fast/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tests/fast/test_link.py").symlink_to(tmp_path / "elsewhere/test_b.py")
    (tmp_path / "tests/fast/loop").symlink_to(tmp_path / "tests")
    assert scan_tree(tmp_path).files == ("tests/fast/test_a.py",)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("test_a[x].py", "test_a[x].py"),
        ("test_new\nline.py", "test_new\\nline.py"),
        ("test_a#1.py", "test_a#1.py"),
        ("test_a|b.py", "test_a|b.py"),
        ("test_bad\udcff.py", "test_bad\\udcff.py"),
    ],
    ids=["bracket", "newline", "hash", "bar", "not utf-8"],
)
def test_a_name_that_pytest_cannot_address_is_an_error_of_that_file(tmp_path: Path, name: str, shown: str) -> None:
    """One such argument would leave a whole shard without tests."""
    write_tree(tmp_path, {"tests/fast/test_good.py": PLAIN, f"tests/fast/{name}": PLAIN})
    found = scan_tree(tmp_path)
    assert errors_of(found) == {f"tests/fast/{shown}": ["bad-name"]}
    assert [item.path for item in found.declarations] == ["tests/fast/test_good.py"]
    found.errors[0].text().encode()


def test_a_file_that_is_not_utf8_is_one_error_even_without_a_declaration(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/fast/test_a.py": b"# \xe9\n", "tests/fast/test_b.py": PLAIN})
    found = scan_tree(tmp_path)
    assert errors_of(found) == {"tests/fast/test_a.py": ["not-utf8"]}
    assert [item.path for item in found.declarations] == ["tests/fast/test_b.py"]


def test_a_file_too_large_to_parse_is_one_error_and_costs_nothing(tmp_path: Path) -> None:
    padding = "# " + "x" * (4 << 20) + "\n"
    files = {"tests/fast/test_a.py": PLAIN, "tests/e2e/test_b.py": padding + cuda(), "tests/fast/test_c.py": padding}
    write_tree(tmp_path, files)
    found = scan_tree(tmp_path)
    assert errors_of(found) == {"tests/e2e/test_b.py": ["too-large"]}
    # Without a declaration nothing has to be parsed.
    assert [item.path for item in found.declarations] == ["tests/fast/test_a.py", "tests/fast/test_c.py"]


def test_one_broken_file_changes_nothing_for_the_others(tmp_path: Path) -> None:
    files = {f"tests/e2e/test_{index}.py": cuda() for index in range(5)}
    write_tree(tmp_path, files)
    whole = scan_tree(tmp_path)
    (tmp_path / "tests/e2e/test_2.py").write_text("register_cuda_ci(")
    broken = scan_tree(tmp_path)
    assert broken.faulty == ("tests/e2e/test_2.py",)
    assert broken.declarations == tuple(item for item in whole.declarations if item.path != "tests/e2e/test_2.py")


def test_the_cache_gives_the_same_scan_and_follows_changes(tmp_path: Path) -> None:
    bound = 'from miles_ci.declare import register_metric_bound\nregister_metric_bound("kl", rel_up=1, rel_down=1, steps=[1, 2])\n'
    unstable = '{"reason": "a reason of length", "issue": "#1", "until": "2026-12-24"}'
    write_tree(
        tmp_path,
        {
            "tests/e2e/test_a.py": cuda(unstable=unstable, num_gpus="1") + bound,
            "tests/e2e/test_b.py": cuda(num_gpus="X"),
            "tests/fast/cases.py": PLAIN,
            "tests/fast/test_c.py": PLAIN,
        },
    )
    cache = tmp_path / "cache"
    cold, warm, without = (
        scan_tree(tmp_path, cache_dir=cache),
        scan_tree(tmp_path, cache_dir=cache),
        scan_tree(tmp_path),
    )
    assert cold == warm == without
    assert [item.places for item in warm.declarations] == [item.places for item in without.declarations]
    (tmp_path / "tests/e2e/test_b.py").write_text(cuda())
    assert scan_tree(tmp_path, cache_dir=cache) == scan_tree(tmp_path)
    entries = list(json.loads((cache / FILE_NAME).read_text()).values())
    assert [len(errors) for _, _, errors in entries] == [0, 0, 1, 1], "what the last scan did not use comes last"


def test_of_what_a_scan_did_not_use_the_cache_keeps_a_bounded_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "KEPT_UNUSED", 2)
    for number in range(1, 6):
        write_tree(tmp_path, {"tests/e2e/test_a.py": cpu(est_time=str(number))})
        scan_tree(tmp_path, cache_dir=tmp_path / "cache")
    kept = json.loads((tmp_path / "cache" / FILE_NAME).read_text())
    assert [declarations[0]["est_time"] for declarations, _, _ in kept.values()] == [5, 4, 3]


def test_the_same_content_under_another_name_is_judged_by_its_own_name(tmp_path: Path) -> None:
    source = cpu()
    write_tree(tmp_path, {"tests/e2e/test_a.py": source, "tests/e2e/tool.py": source})
    cache = tmp_path / "cache"
    for _ in range(2):
        found = scan_tree(tmp_path, cache_dir=cache)
        assert [item.path for item in found.declarations] == ["tests/e2e/test_a.py"]
        assert errors_of(found) == {"tests/e2e/tool.py": ["misplaced-test"]}


def test_a_damaged_cache_is_ignored(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/e2e/test_a.py": cuda()})
    cache = tmp_path / "cache"
    whole = scan_tree(tmp_path, cache_dir=cache)
    for damage in ("", "[]", "{", '{"x": 1}'):
        (cache / FILE_NAME).write_text(damage)
        assert scan_tree(tmp_path, cache_dir=cache) == whole
    key = next(iter(json.loads((cache / FILE_NAME).read_text())))
    (cache / FILE_NAME).write_text(json.dumps({key: [[{"nonsense": 1}], [], []]}))
    assert scan_tree(tmp_path, cache_dir=cache) == whole

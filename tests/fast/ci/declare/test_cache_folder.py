"""What a commit, or another user, puts where a cache might lie is never believed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from miles_ci.declare import cache_folder as module
from miles_ci.declare.cache import FILE_NAME
from miles_ci.declare.cache_folder import cache_folder, read_cache, write_cache
from miles_ci.declare.tree import scan_tree
from miles_ci.errors import UsageError
from miles_ci.workspace import Workspace
from tests.fast.ci.helpers.trees import cpu, write_tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


def environ(**given: str) -> dict[str, str]:
    return {"HOME": "/home/ada", **given}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "/home/ada/.cache/miles-ci"),
        ({"XDG_CACHE_HOME": "/var/caches"}, "/var/caches/miles-ci"),
        ({"XDG_CACHE_HOME": "caches"}, "/home/ada/.cache/miles-ci"),
        ({"MILES_CI_CACHE_DIR": "/elsewhere"}, "/elsewhere"),
        ({"MILES_CI_CACHE_DIR": "/elsewhere", "GITHUB_ACTIONS": "true"}, "/elsewhere"),
        ({"GITHUB_ACTIONS": "true"}, None),
        ({"HOME": "relative"}, None),
    ],
)
def test_the_folder_is_the_users_and_in_actions_there_is_none(root: Path, given: dict[str, str], expected) -> None:
    assert cache_folder(root, environ(**given)) == (None if expected is None else Path(expected))


def test_a_folder_inside_the_repository_is_refused_when_named_and_unused_when_it_is_the_default(root: Path) -> None:
    (root.parent / "link").symlink_to(root / "cache")
    for named in (root / "cache", root, root.parent / "link", root / ".." / "tree" / "cache"):
        with pytest.raises(UsageError, match="lies in the repository, where a commit could fill it; name one outside"):
            cache_folder(root, environ(MILES_CI_CACHE_DIR=str(named)))
    assert cache_folder(root, environ(MILES_CI_CACHE_DIR=str(root) + "-cache")) == Path(f"{root}-cache")
    assert cache_folder(root, environ(HOME=str(root))) is None
    assert cache_folder(root, environ(XDG_CACHE_HOME=str(root / "x"))) is None


def forged(root: Path, folder: Path) -> None:
    """A cache that says of the tree's one test that it belongs to another suite."""
    scan_tree(root, cache_dir=folder)
    file = folder / FILE_NAME
    file.write_text(file.read_text().replace("stage-b-cpu", "stage-x-cpu"))


def suites(root: Path, folder: Path | None) -> list[str]:
    return [item.suite for item in scan_tree(root, cache_dir=folder).declarations]


def test_a_cache_that_comes_with_the_checkout_is_not_believed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILES_CI_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(root.parent / "caches"))
    write_tree(root, {"tests/e2e/test_a.py": cpu(suite="stage-b-cpu")})
    forged(root, root / ".miles-ci")
    assert suites(root, root / ".miles-ci") == ["stage-x-cpu"], "the forgery works where it is read"
    assert [item.suite for item in Workspace.find(str(root)).scan.declarations] == ["stage-b-cpu"]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_cache_that_others_could_write_is_not_believed(root: Path, mode: int) -> None:
    write_tree(root, {"tests/e2e/test_a.py": cpu(suite="stage-b-cpu")})
    folder = root.parent / "cache"
    forged(root, folder)
    assert suites(root, folder) == ["stage-x-cpu"]
    (folder / FILE_NAME).chmod(mode)
    assert suites(root, folder) == ["stage-b-cpu"]
    forged(root, folder)
    folder.chmod(mode)
    assert suites(root, folder) == ["stage-b-cpu"]


def test_only_a_plain_file_of_ours_of_bounded_size_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cache(tmp_path, "a.json", [1])
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    os.mkfifo(tmp_path / "pipe.json", 0o600)
    (tmp_path / "deep.json").write_text("[" * 200_000)
    assert read_cache(tmp_path, "a.json") == [1]
    assert [read_cache(tmp_path, name) for name in ("link.json", "pipe.json", "deep.json", "none.json")] == [None] * 4
    assert read_cache(None, "a.json") is None
    monkeypatch.setattr(module, "MAX_BYTES", 2)
    assert read_cache(tmp_path, "a.json") is None
    monkeypatch.setattr(module, "MAX_BYTES", 3)
    assert read_cache(tmp_path, "a.json") == [1]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert read_cache(tmp_path, "a.json") is None


def test_what_is_written_is_the_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "cache"
    write_cache(folder, "a.json", {"x": 1})
    assert json.loads((folder / "a.json").read_text()) == {"x": 1}
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "a.json")] == [0o700, 0o600]
    write_cache(None, "b.json", 1)
    (tmp_path / "file").write_text("")
    write_cache(tmp_path / "file", "a.json", 1)

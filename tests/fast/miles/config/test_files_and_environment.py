"""Atomic writes, storage errors with a fix, and environment variables that must be known."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from pathlib import Path

import pytest

import miles
from miles.config import ConfigError, MilesError, environment
from miles.config.files import replacing, storage_error, write_atomic


def test_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomic(path, "old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_write_that_does_not_fit_keeps_the_old_content_and_removes_its_own(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomic(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(ConfigError, match=r"result\.json: the limit on file sizes is reached"):
            write_atomic(path, b"x" * 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_interrupted_writer_leaves_no_temporary_file(tmp_path: Path) -> None:
    def write() -> None:
        with replacing(tmp_path / "plot.png") as temporary:
            assert temporary.suffix == ".png"
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("file/below", "a part of this path is a file"),
        ("absent/x", "does not exist; create it"),
        ("folder", "in the way"),
    ],
)
def test_unwritable_place_is_a_config_error_that_says_what_to_do(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=said) as raised:
        write_atomic(tmp_path / path, "text")
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG])
def test_every_storage_error_names_path_and_fix(number: int) -> None:
    text = str(storage_error(Path("runs/a"), OSError(number, os.strerror(number))))
    assert text.startswith("runs/a: ")
    assert any(word in text for word in ("choose", "free space", "raise it"))


def test_unknown_errno_keeps_the_systems_own_words() -> None:
    assert str(storage_error(Path("x"), OSError(errno.EIO, "Input/output error"))) == "x: Input/output error"


def test_misspelt_variable_of_ours_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"MILES_RUN_DIR is not known; did you mean 'MILES_RUNS_DIR'\?"):
        environment.refuse_unknown({"MILES_RUN_DIR": "x", "PATH": "y"})
    with pytest.raises(ConfigError, match="MILES_LOG_LEVEL is not known"):
        environment.refuse_unknown({"MILES_LOG_LEVEL": "debug"})
    environment.refuse_unknown({"MILES_RUNS_DIR": "x", "MILES_CI_ANYTHING": "y", "OTHER": "z"})


def test_every_declared_variable_is_read_somewhere() -> None:
    source = "".join(path.read_text() for path in Path(miles.__file__).parent.rglob("*.py"))
    unread = [name for name in environment.VARIABLES if f'environment.read("{name}")' not in source]
    assert unread == []


def test_only_declared_variables_can_be_read() -> None:
    assert environment.read("MILES_RUNS_DIR", environ={"MILES_RUNS_DIR": "here"}) == "here"
    assert environment.read("MILES_RUNS_DIR", "default", environ={}) == "default"
    with pytest.raises(KeyError, match="not declared"):
        environment.read("MILES_OTHER", environ={})


def test_errors_keep_class_text_and_exit_code_across_a_process_boundary() -> None:
    for error in (MilesError("a"), ConfigError("b")):
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back), back.exit_code) == (type(error), str(error), error.exit_code)

"""Checkpoint folders without a model: completeness, damage, storage errors."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.config import ConfigError
from miles.train import checkpoint
from miles.train.checkpoint import Manifest
from miles.train.errors import CheckpointError


def save(directory, step, *, keep=5, value=0.0):
    folder = checkpoint.begin(directory, step)
    record = checkpoint.write_tensors(folder, "rank_00000.safetensors", {"x": torch.full((4,), value)}, {"rank": 0})
    manifest = Manifest(step, {"policy": step}, "qwen3", {"tp": 1}, {}, [record], {"step": step})
    return checkpoint.publish(folder, manifest, keep=keep)


def test_no_folder_and_empty_folder_start_fresh(tmp_path):
    assert checkpoint.find(tmp_path / "none").path is None
    assert checkpoint.find(tmp_path).path is None


def test_newest_by_number_not_by_name(tmp_path):
    for step in (9, 10, 2):
        save(tmp_path, step)
    assert checkpoint.find(tmp_path).path == tmp_path / "iter_10"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "COMPLETE").unlink(), "COMPLETE is missing"),
        (lambda path: (path / "rank_00000.safetensors").unlink(), "file is missing"),
        (lambda path: (path / "rank_00000.safetensors").write_bytes(b"short"), "expected 80 bytes, got 5|bytes, got 5"),
        (lambda path: (path / "manifest.json").write_text("{}"), "differs from the sha256 in COMPLETE"),
    ],
)
def test_damaged_checkpoint_is_passed_over_and_named(damage, reason, tmp_path):
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    found = checkpoint.find(tmp_path)
    assert found.path == tmp_path / "iter_1"
    assert [item.name for item in found.skipped] == ["iter_2"]
    assert re.search(reason, found.skipped[0].reason)


def test_all_damaged_is_an_error_that_names_each(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "rank_00000.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint verifies.*iter_2.*iter_1"):
        checkpoint.find(tmp_path)


def test_killed_between_the_two_renames_the_old_one_is_found(tmp_path):
    save(tmp_path, 3).rename(tmp_path / "iter_3.old")
    assert checkpoint.find(tmp_path).path == tmp_path / "iter_3.old"


def test_full_disk_is_a_clear_error_and_nothing_becomes_visible(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("miles.train.checkpoint.os.fsync", full)
    with pytest.raises(ConfigError, match="the disk is full"):
        save(tmp_path, 2)
    assert checkpoint.find(tmp_path).path == tmp_path / "iter_1"


def test_a_file_where_the_folder_should_be_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="run"):
        save(tmp_path / "run", 1)


def test_another_schema_is_refused(tmp_path):
    path = save(tmp_path, 1) / "manifest.json"
    text = path.read_text().replace('"schema": 1', '"schema": 99')
    with pytest.raises(CheckpointError, match="schema 99 is not 1"):
        Manifest.from_json(text, path)


FILES = ("COMPLETE", "manifest.json", "rank_00000.safetensors")


def _flip(path, place, bit):
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)


def _folder_instead(path):
    path.unlink()
    path.mkdir()


def _link_to_nothing(path):
    path.unlink()
    path.symlink_to(path.with_name("nothing"))


def _pipe_instead(path):
    path.unlink()
    os.mkfifo(path)


_DAMAGE = st.one_of(
    st.tuples(st.just(_flip), st.integers(0, 1 << 20), st.integers(0, 7)),
    st.builds(lambda keep: (lambda path: path.write_bytes(path.read_bytes()[: keep % path.stat().st_size]),), st.integers(0, 1 << 20)),
    st.builds(lambda data: (lambda path: path.write_bytes(data),), st.binary(max_size=90)),
    st.sampled_from([(_folder_instead,), (_link_to_nothing,), (_pipe_instead,)]),
)  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        save(directory, step)
    return directory


@given(name=st.sampled_from(FILES), damage=_DAMAGE)
def test_whatever_befalls_a_file_the_older_checkpoint_is_taken_and_the_reason_said(two, name, damage):
    directory = two.with_name("damaged")
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(two, directory)
    change, *arguments = damage
    change(directory / "iter_2" / name, *arguments)
    found = checkpoint.find(directory)
    assert found.path == directory / "iter_1"
    assert found.manifest.step == 1
    assert [item.name for item in found.skipped] == ["iter_2"]
    assert f"iter_2/{'manifest.json' if name == 'COMPLETE' else name}" in found.skipped[0].reason or (
        f"iter_2/{name}" in found.skipped[0].reason
    )


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("place", [0, 31, 63])
def test_any_bit_of_complete_matters(bit, place, tmp_path):
    save(tmp_path, 1)
    _flip(save(tmp_path, 2) / "COMPLETE", place, bit)
    assert checkpoint.find(tmp_path).path == tmp_path / "iter_1"


@pytest.mark.parametrize("name", [*FILES, "."])
def test_what_may_not_be_read_is_passed_over_and_never_a_fresh_start(name, tmp_path, monkeypatch):
    """Permissions do not bind root, so the system's refusal is played."""
    for step in (1, 2):
        save(tmp_path, step)
    _refuse(monkeypatch, tmp_path / "iter_2" / name)
    found = checkpoint.find(tmp_path)
    assert found.path == tmp_path / "iter_1"
    assert "cannot be read: Permission denied" in found.skipped[0].reason
    shutil.rmtree(tmp_path / "iter_1")
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpoint.find(tmp_path)


def _refuse(monkeypatch, target):
    """Opening and looking at `target` fails; for a folder, at all that it holds."""

    def refused(path):
        path = os.fspath(path)
        return path == os.fspath(target) or (target.is_dir() and path.startswith(f"{target}{os.sep}"))

    def guard(module, name):
        real = getattr(module, name)

        def guarded(path, *args, **kwargs):
            if not isinstance(path, int) and refused(path):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(module, name, guarded)

    real_is_dir = os.path.isdir(target)
    guard(io, "open")
    if real_is_dir:
        guard(os, "lstat")


def test_a_folder_of_checkpoints_that_may_not_be_listed_is_an_error(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def refused(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("miles.train.checkpoint.Path.iterdir", refused)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        checkpoint.find(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"name": "rank_00000.safetensors"', '"name": "../iter_1/rank_00000.safetensors"'),
        ('"name": "rank_00000.safetensors"', '"name": 5'),
        ('"files": [', '"files": 3, "versions": ['),
        ("{", "[" * 100_000),
        ('"schema": 1', '"schema": 99'),
    ],
)
def test_a_manifest_that_is_none_though_its_digest_agrees_is_passed_over(old, new, tmp_path):
    save(tmp_path, 1)
    listing = save(tmp_path, 2) / "manifest.json"
    text = listing.read_text()
    assert old in text
    listing.write_text(text.replace(old, new, 1))
    (listing.parent / "COMPLETE").write_text(hashlib.sha256(listing.read_bytes()).hexdigest() + "\n")
    found = checkpoint.find(tmp_path)
    assert found.path == tmp_path / "iter_1"
    assert "manifest.json" in found.skipped[0].reason

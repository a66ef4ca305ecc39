"""Checkpoint folders without a model: completeness, damage, storage errors."""

from __future__ import annotations

import errno

import pytest
import torch

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
    import re

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

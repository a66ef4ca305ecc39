"""Folders of killed runners are removed at the next start; those in use, too young or not ours are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles_ci.run.devices import temporary
from miles_ci.run.devices.slots import LeaseManager, Request

OWNER = """
import sys, time
from pathlib import Path
from miles_ci.run.devices.slots import LeaseManager, Request
lease = LeaseManager(Path(sys.argv[1]) / "locks", tmp_parent=Path(sys.argv[1])).acquire(Request("x", 0, 0.0))
print(lease.tmpdir, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def any_age(monkeypatch):
    monkeypatch.setattr(temporary, "_YOUNG_S", -1.0)


def test_folder_of_a_killed_runner_is_removed_at_the_next_start_and_not_before(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    (folder / "left").write_text("x")
    LeaseManager(tmp_path / "locks", tmp_parent=tmp_path)
    assert (folder / "left").exists()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    LeaseManager(tmp_path / "locks", tmp_parent=tmp_path)
    assert not folder.exists()


def test_released_lease_leaves_no_folder(tmp_path):
    lease = LeaseManager(tmp_path / "locks", tmp_parent=tmp_path).acquire(Request("x", 0, 0.0))
    assert lease is not None
    assert lease.tmpdir.is_dir()
    lease.release()
    assert not lease.tmpdir.exists()


def test_young_folders_links_files_and_other_names_are_left_alone(tmp_path, monkeypatch):
    target = tmp_path / "precious"
    target.mkdir()
    (tmp_path / "mci-1-aaaaaaaa").symlink_to(target)
    (tmp_path / "mci-1-bbbbbbbb").write_text("a file")
    (tmp_path / "mci-mine").mkdir()
    assert temporary.remove_abandoned(tmp_path) == []
    young = tmp_path / "mci-1-cccccccc"
    young.mkdir()
    monkeypatch.setattr(temporary, "_YOUNG_S", 3600.0)
    assert temporary.remove_abandoned(tmp_path) == []
    monkeypatch.setattr(temporary, "_YOUNG_S", -1.0)
    assert temporary.remove_abandoned(tmp_path) == [young]
    assert target.is_dir()

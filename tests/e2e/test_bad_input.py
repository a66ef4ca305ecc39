"""Every bad input of a user through the real command line: exit code 2 and a message that names the fix.

Most end before Ray starts. A full disk is met where it hurts: while the model is made, during a
checkpoint and while metrics are written; what was finished stays, nothing half-written is left.
"""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miles.data.tasks.copy_digits import CopyDigits
from miles.data.tokenizer import build_char_tokenizer
from miles.models.create import create_checkpoint
from miles.observe.metrics_log import read_rows
from miles.train import checkpoint
from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=90, suite="stage-b-cpu")

QUICKSTART = Path("recipes/quickstart.yaml")
RUN_LIMIT_S = 90
LONG = ("run.steps=4000", "eval.sets=[]", "expect={}")


def refused(runs, *sets: str, recipe: str = str(QUICKSTART)) -> str:
    """Run the command; its error text after checking the exit code, that nothing was started and no traceback shown."""
    done = runs.run("bad", *sets, recipe=recipe)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert "starting Ray" not in done.stdout
    return done.stderr


BROKEN = {
    "name: [quickstart\nseed: 0\n": ("broken.yaml:2:", "not valid YAML"),
    "name: a\nname: b\n": ("broken.yaml:2:1: key 'name' is given twice; keep one",),
    "name: a\nrun:\n\tsteps: 1\n": ("broken.yaml:3:1: a tab is used for indentation; use spaces",),
    "": ("broken.yaml: the file is empty; it must hold a mapping",),
}


@pytest.mark.parametrize("text", BROKEN, ids=["unclosed", "twice", "tab", "empty"])
def test_broken_yaml_is_refused_at_its_line(runs, tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    error = refused(runs, recipe=str(path))
    assert all(said in error for said in BROKEN[text]), error


def test_unknown_key_is_refused_with_place_and_nearest_name(runs, tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text(QUICKSTART.read_text().replace("group_size", "grop_size"))
    line = 1 + path.read_text().splitlines().index("  grop_size: 16")
    error = refused(runs, recipe=str(path))
    assert f"typo.yaml:{line}:3: unknown key 'rollout.grop_size'; did you mean 'group_size'?" in error
    assert "--set train.optimizer.lrr=1: unknown key 'train.optimizer.lrr'; did you mean 'lr'?" in refused(
        runs, "train.optimizer.lrr=1"
    )


def test_missing_model_folder_is_refused(runs, tmp_path: Path) -> None:
    error = refused(runs, f"model.path={tmp_path / 'absent'}")
    assert f"{tmp_path / 'absent'}: model folder does not exist; give a folder with config.json and" in error


def test_truncated_weights_are_refused_with_file_and_sizes(runs, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    build_char_tokenizer(CopyDigits.alphabet, tokenizer)
    model = create_checkpoint(tmp_path / "model", tokenizer_dir=tokenizer, seed=0)
    weights = model / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size // 2)
    error = refused(runs, f"model.path={model}")
    assert f"{weights}: truncated safetensors file at tensor" in error
    assert f"got {size // 2}; copy or download the file again" in error
    assert not (runs.folder / "bad").exists()


def test_group_of_one_is_refused_with_what_to_raise(runs) -> None:
    error = refused(runs, "rollout.group_size=1")
    assert "raise rollout.group_size to 2 or more, or choose reinforce_pp" in error


def test_tensor_parallel_size_that_does_not_divide_is_refused_with_the_divisors(runs) -> None:
    error = refused(runs, "train.parallel.tp=3")
    assert "train.parallel.tp=3 does not divide the model's 4 attention heads; use a divisor of 4" in error


def test_engine_port_in_use_is_refused_with_its_key(runs) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        error = refused(runs, f"engine.port={port}")
    assert f"engine.port {port} on 127.0.0.1: Address already in use; choose another port, or 0 for a free one" in error


def test_unwritable_run_folder_is_refused(runs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refused(runs, f"run.directory={tmp_path / 'file' / 'runs'}")
    assert f"{tmp_path}/file/runs/bad: a part of this path is a file; choose another folder" in error
    # Permission bits do not bind root; no user may make a folder here.
    error = refused(runs, "run.directory=/proc/runs")
    assert "/proc/runs/bad: " in error


def test_fault_that_an_engine_finds_keeps_its_message_and_exit_code(runs) -> None:
    done = runs.run("bad", "engine.start_timeout_s=0.001")
    assert done.returncode == 1, done.stderr
    assert re.match(r"error: engine process \d+: not ready after 0\.001 s; ", done.stderr)


def test_devices_that_are_not_here_are_refused_with_the_numbers(runs) -> None:
    assert "[DEVICES] engine.device cuda:99 names one device" in refused(runs, "engine.device='cuda:99'")
    error = refused(runs, "engine.device=cuda", "engine.count=99", "train.device=cpu")
    assert "needs 0 GPUs for 1 trainer rank + 99 for 99 engines = 99, but 1 node has " in error


class Disk:
    """A folder whose space can run out: a small file system where this user may mount one, else a limit on the size
    of the files that one process writes."""

    def __init__(self, folder: Path, *, kib: int) -> None:
        self.folder, self.bytes = folder, kib * 1024
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        # Quiet on purpose: without the right to mount, the limit does the work.
        self.mounted = shutil.which("mount") is not None and (
            subprocess.run(command, capture_output=True, check=False).returncode == 0
        )
        self.said = "the disk is full; free space" if self.mounted else "the limit on file sizes is reached (ulimit -f)"

    def limit(self, pid: int, size: int) -> None:
        """Without a mount: no file of process `pid` may grow beyond `size` bytes from now on."""
        if not self.mounted:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))

    def fill(self) -> None:
        """With a mount: use up what is left."""
        if self.mounted:
            with contextlib.suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    with contextlib.ExitStack() as stack:

        def make(*, kib: int) -> Disk:
            made = Disk(tmp_path / "disk", kib=kib)
            stack.callback(made.close)
            return made

        yield make


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}"
        time.sleep(0.02)


def half_written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if ".tmp" in path.name]


def ended(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=RUN_LIMIT_S)
    assert process.returncode == 2, out + err
    return err


def test_disk_that_is_full_before_the_model_is_made(runs, disk) -> None:
    small = disk(kib=128)
    command = runs.command("bad", f"run.directory={small.folder}")
    if not small.mounted:
        command = ["sh", "-c", f'ulimit -f {small.bytes // 512} && exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{small.folder}/bad/model: {small.said}" in done.stderr
    assert not (small.folder / "bad" / "model").exists()
    assert half_written(small.folder) == []


def test_disk_that_fills_up_in_a_checkpoint_leaves_the_earlier_rows_and_no_half_checkpoint(runs, disk) -> None:
    small = disk(kib=900)
    process = runs.start("bad", *LONG, f"run.directory={small.folder}", "run.checkpoint_every=30")
    folder = small.folder / "bad"
    wait_until(lambda: process.poll() is not None or (folder / "metrics.jsonl").exists(), "the first row")
    for trainer in runs.processes(process)["trainer"]:
        small.limit(trainer.pid, 400 * 1024)
    error = ended(process)
    assert "checkpoint was not saved: " in error
    assert small.said in error
    assert "iter_30" in error
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == list(range(30))
    assert checkpoint.find(folder / "checkpoints").path is None
    assert half_written(folder) == []


def test_disk_that_fills_up_between_two_rows_leaves_whole_rows(runs, disk) -> None:
    small = disk(kib=4096)
    process = runs.start("bad", *LONG, f"run.directory={small.folder}", "run.checkpoint_every=4000")
    metrics = small.folder / "bad" / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or (metrics.exists() and len(read_rows(metrics)) > 2), "three rows")
    small.fill()
    small.limit(process.pid, metrics.stat().st_size + 100)
    error = ended(process)
    assert re.search(rf"error: {small.folder}/bad/metrics\.jsonl: {re.escape(small.said)}", error), error
    assert metrics.read_text().endswith("}\n")
    assert len(read_rows(metrics)) > 2
    assert half_written(small.folder) == []

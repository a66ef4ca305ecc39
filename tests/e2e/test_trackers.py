"""Runs that are watched: killed and resumed with real trackers, and with trackers that are of no use."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracker_files import mlflow_points, mlflow_runs, offline_wandb

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=120, suite="stage-b-cpu")

KEY = "0123456789abcdef0123456789abcdef01234567"
SHORT = ("run.steps=12", "run.checkpoint_every=5", "eval.sets=[]", "expect={}")
ALL = ("observe.trackers=[tensorboard, wandb, mlflow]", "observe.wandb.mode=offline", "observe.finish_s=100")


def environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "WANDB_API_KEY": KEY, "MLFLOW_TRACKING_TOKEN": KEY, "WANDB_INIT_TIMEOUT": "2"}


def sample_steps(folder: Path) -> dict[int, int]:
    lines = [json.loads(line) for name in ("samples.1.jsonl", "samples.jsonl") if (folder / name).exists()
             for line in (folder / name).read_text().splitlines()]  # fmt: skip
    return {step: sum(line["step"] == step for line in lines) for step in sorted({line["step"] for line in lines})}


def files_with_the_key(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    return [path for path in files if KEY.encode() in path.read_bytes()]


def test_killed_and_resumed_run_is_one_run_in_every_tracker_with_each_step_once(runs, tmp_path: Path) -> None:
    known = environment(tmp_path)
    process = runs.start("seen", *SHORT, *ALL, environment=known)
    runs.wait_for_step("seen", 6, process)
    process.kill()
    process.communicate(timeout=60)
    done = runs.run("seen", *SHORT, *ALL, environment=known)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout

    folder, losses = runs.folder / "seen", [(row["step"], row["train/loss"]) for row in runs.rows("seen")]
    assert [step for step, _ in losses] == list(range(12))
    ((_, wandb_rows),) = offline_wandb(folder)
    assert [(row["_step"], row["train/loss"]) for row in wandb_rows] == losses
    assert mlflow_points(folder / "mlflow.db", "train/loss") == losses
    assert list(mlflow_runs(folder / "mlflow.db").values()) == ["FINISHED"]
    (events,) = (folder / "tensorboard").iterdir()
    read = EventAccumulator(str(events))
    read.Reload()
    assert [point.step for point in read.Scalars("train/loss")] == list(range(12))
    # Two groups of each step.
    counts = sample_steps(folder)
    assert list(counts) == list(range(12))
    assert len(set(counts.values())) == 1

    assert files_with_the_key(tmp_path) == []
    assert [process for process in psutil.process_iter(["environ"]) if _knows(process, tmp_path)] == []


def _knows(process: psutil.Process, home: Path) -> bool:
    return (process.info["environ"] or {}).get("HOME") == str(home)


def test_trackers_that_do_not_answer_cost_a_warning_each_and_change_nothing(runs, tmp_path: Path) -> None:
    quiet = runs.run("quiet", *SHORT, "observe.trackers=[]", "observe.samples.groups=0")
    assert quiet.returncode == 0, quiet.stderr
    assert not list((runs.folder / "quiet").glob("samples*"))
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        watched = runs.run(
            "watched",
            *SHORT,
            "observe.trackers=[mlflow, wandb]",
            f"observe.mlflow.uri=http://127.0.0.1:{silent.getsockname()[1]}",
            "observe.finish_s=1",
            environment={
                **environment(tmp_path),
                "WANDB_BASE_URL": f"http://127.0.0.1:{closed.getsockname()[1]}",
            },
        )
    assert watched.returncode == 0, watched.stderr
    warnings = [line for line in watched.stdout.splitlines() if "warning" in line]
    assert sorted(line.split(": ")[2] for line in warnings) == ["mlflow", "wandb"], watched.stdout
    assert runs.curve("watched") == runs.curve("quiet")
    assert files_with_the_key(tmp_path) == []


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_tracker_that_is_not_installed_is_one_line_with_the_fix(runs, tmp_path: Path, dry_run: bool) -> None:
    # A start-up file that hides the package, as if it had never been installed.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['wandb'] = None\n")
    process = runs.start(
        "none",
        "observe.trackers=[wandb]",
        dry_run=dry_run,
        environment={"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])},
    )
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2, err
    assert err.strip() == "error: observe.trackers: wandb: wandb not installed; pip install 'miles-rl[wandb]'"
    assert not (runs.folder / "none").exists()

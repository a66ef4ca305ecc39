"""Commands of guides, run as the page has them, in a folder of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import read_page
from tracker_files import offline_wandb

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=60, suite="stage-b-cpu", nightly=True, timeout=600)

ROOT = Path(__file__).resolve().parents[2]


def follow(page: str, folder: Path, runs) -> list[str]:
    """Run every `miles` command of the page in order; the last line that each printed."""
    (folder / "recipes").symlink_to(ROOT / "recipes")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(runs.temporary), "PYTHONPATH": str(ROOT)}
    said = []
    for _, words in read_page(ROOT / page).commands():
        assert words[0] == "miles", words
        command = [sys.executable, "-m", "miles.cli", *words[1:]]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout.strip().splitlines()[-1])
    assert said
    return said


def rows(folder: Path, name: str) -> list[dict[str, float]]:
    # Overrides beside the name keep the name's folder.
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(400)
def test_what_a_run_does_is_seen(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    page = "docs/guide/seeing.md"
    said = follow(page, tmp_path, runs)
    for shown in said[1:]:
        assert shown.startswith("log-prob sum "), shown
    ((_, tracked),) = offline_wandb(tmp_path / "runs" / "quickstart")
    assert [row["_step"] for row in tracked] == [row["step"] for row in rows(tmp_path, "quickstart")]
    (code,) = [fence for fence in read_page(ROOT / page).fences if fence.language == "python"]
    done = subprocess.run([sys.executable, "-c", "\n".join(code.lines)], cwd=tmp_path, capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip
    assert done.stdout.strip()


@pytest.mark.timeout(400)
def test_a_finished_run_teaches_the_next_one(runs, tmp_path):
    follow("docs/guide/distillation.md", tmp_path, runs)
    learned = rows(tmp_path, "student")
    assert learned[0]["rollout/reward_mean"] <= 0.2
    assert sum(row["rollout/reward_mean"] for row in learned[-5:]) / 5 >= 0.9
    assert learned[-1]["train/teacher_kl"] < 0.2 * learned[0]["train/teacher_kl"]


@pytest.mark.timeout(400)
def test_an_exported_model_is_a_model_to_start_from(runs, tmp_path):
    follow("docs/guide/bring-your-model.md", tmp_path, runs)
    first, second = rows(tmp_path, "first"), rows(tmp_path, "second")
    assert second[0]["rollout/reward_mean"] >= 0.9 > first[0]["rollout/reward_mean"]


@pytest.mark.timeout(400)
def test_a_run_is_evaluated_and_its_best_model_kept(runs, tmp_path):
    said = follow("docs/guide/evaluation.md", tmp_path, runs)
    assert said[0].startswith("evaluated: reward 0.")
    found = [row["eval/drawn/pass_at_4"] for row in rows(tmp_path, "evaluated") if "eval/drawn/pass_at_4" in row]
    assert len(found) == 11
    assert found[-1] >= 0.9 > found[0]
    (best,) = (tmp_path / "runs" / "evaluated" / "best").iterdir()
    assert {path.name for path in best.iterdir()} == {"best.json", "checkpoints", "hf_model"}


def test_recipe_and_program_of_the_guides_are_whole(runs, tmp_path):
    from miles.recipe import load
    from miles.recipe.rules import check_or_raise

    (recipe,) = (f for f in read_page(ROOT / "docs/guide/evaluation.md").fences if f.language == "yaml")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.yaml").symlink_to(ROOT / "recipes" / "quickstart.yaml")
    (tmp_path / "recipes" / "mine.yaml").write_text("\n".join(recipe.lines))
    assert [finding.rule for finding in check_or_raise(load(tmp_path / "recipes" / "mine.yaml"))] == ["VALIDATION"]
    (program,) = (f for f in read_page(ROOT / "docs/guide/from-python.md").fences if f.language == "python")
    (tmp_path / "program.py").write_text("\n".join(program.lines))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(runs.temporary), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine: reward 0." in done.stdout
    assert (tmp_path / "runs" / "mine" / "hf_model" / "config.json").is_file()


@pytest.mark.timeout(400)
def test_a_warm_start_reaches_its_reward_by_the_guides_command(runs, tmp_path):
    *_, evaluated = follow("docs/guide/warm-start.md", tmp_path, runs)
    assert rows(tmp_path, "spell_backward_sft")[0]["train/loss"] > 3.0
    learned = [row["rollout/reward_mean"] for row in rows(tmp_path, "sft_then_grpo") if "rollout/reward_mean" in row]
    assert sum(learned[-5:]) / 5 >= 0.9
    assert evaluated

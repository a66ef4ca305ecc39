"""Does a supervised start pay? Seconds until the reward is 0.9: recipes/sft_then_grpo.yaml against reasoning_gym.yaml.

    python benchmarks/warm_start.py [--seeds 0 1 2] [--out FILE]
    python benchmarks/warm_start.py --write-examples

Both as a user starts them, each in a folder of its own, one after the other. The target is reached at the first step
whose mean reward over five steps is 0.9; the first 50 steps, whose prompts are the examples, are left out. Seconds count
training steps up to there, those of the first phase included; with the whole first phase, also the start and end of its
processes, its export and the measuring of its held-out loss.
`--write-examples` makes the examples of the first phase again: prompts that reasoning_gym.yaml trains on (none that it
holds out), with their answers.
Writes every run as JSON with date, hardware and command. Exit code 1 when the warm start is not the faster one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cpu_record
from recipes_learn import REPOSITORY, TARGET, figures

RECIPES = ("sft_then_grpo", "reasoning_gym")
FIRST = "spell_backward_sft"
EXAMPLES, EXAMPLES_FILE = 400, REPOSITORY / "recipes" / "data" / "spell_backward.jsonl"
TIMEOUT_S = 1200.0
# The stream's first prompts are the examples, and their reward would be that of what was learnt by heart.
AFTER = 50


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def learn(recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    """One command in a folder of its own, to its end."""
    name = f"{recipe}-{seed}"
    options = [
        f"name={name}",
        f"seed={seed}",
        f"run.directory={folder}",
        "expect={}",
        "observe.trackers=[]",
        "eval.sets=[]",
    ]
    command = [sys.executable, "-m", "miles.cli", "train", str(REPOSITORY / "recipes" / f"{recipe}.yaml")]
    command += [word for option in options for word in ("--set", option)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    every = rows(folder / name / "metrics.jsonl")
    found = figures(every[AFTER:])
    first = folder / FIRST
    before = whole = 0.0
    if (first / "result.json").exists():
        before = sum(row.get("time/step", 0.0) for row in rows(first / "metrics.jsonl"))
        whole = json.loads((first / "result.json").read_text(encoding="utf-8"))["wall_s"]
    seconds = found["seconds_to_target"]
    if seconds is not None:
        seconds += sum(row["time/step"] for row in every[:AFTER])
        found["steps_to_target"] += AFTER
    return {
        **found,
        "first_phase_steps_s": before,
        "first_phase_wall_s": whole,
        "seconds_to_target": None if seconds is None else seconds + before,
        "seconds_with_the_whole_first_phase": None if seconds is None else seconds + whole,
    }


def write_examples() -> None:
    """The first distinct prompts of reasoning_gym.yaml's own stream, as conversations with their answers."""
    from miles.config.files import write_atomic
    from miles.data.prompts import PromptSource
    from miles.data.tasks import build_task
    from miles.recipe.inputs import CharacterCount
    from miles.recipe.loader import load

    recipe = load(REPOSITORY / "recipes" / "reasoning_gym.yaml")
    alphabet = build_task(recipe.data, recipe.seed).alphabet
    lines: dict[str, str] = {}
    with PromptSource(recipe.data, CharacterCount(alphabet), recipe.seed) as source:
        while len(lines) < EXAMPLES:
            (prompt,) = source.next_groups(1)
            turns = [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": prompt.answer}]
            lines.setdefault(prompt.text, json.dumps({"messages": turns}))
    write_atomic(EXAMPLES_FILE, "\n".join(lines.values()) + "\n")
    print(f"wrote {EXAMPLES_FILE} ({len(lines)} examples)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=cpu_record.RESULTS / "warm_start.json")
    parser.add_argument("--write-examples", action="store_true", help="write the examples of the first phase, and end")
    arguments = parser.parse_args()
    if arguments.write_examples:
        write_examples()
        return 0
    record: dict[str, Any] = {**cpu_record.head(), "target": TARGET, "runs": {recipe: {} for recipe in RECIPES}}
    for seed in arguments.seeds:
        for recipe in RECIPES:
            with tempfile.TemporaryDirectory() as folder:
                record["runs"][recipe][str(seed)] = run = learn(recipe, seed, Path(folder))
            print(
                f"{recipe:14s} seed {seed}: 0.9 after {run['steps_to_target']} steps of GRPO and {_said(run['seconds_to_target'])} s "
                f"({_said(run['seconds_with_the_whole_first_phase'])} s with the whole first phase); last reward "
                f"{run['reward_last']:.3f}",
                flush=True,
            )
    never = float("inf")
    medians = {
        recipe: statistics.median(
            run["seconds_with_the_whole_first_phase"] or never for run in record["runs"][recipe].values()
        )
        for recipe in RECIPES
    }
    warm, alone = (medians[recipe] for recipe in RECIPES)
    print(f"median seconds to {TARGET}, the whole first phase included: warm start {warm:.1f}, GRPO alone {alone:.1f}")
    cpu_record.write(arguments.out, record)
    return 0 if warm < alone else 1


def _said(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f}"


if __name__ == "__main__":
    raise SystemExit(main())

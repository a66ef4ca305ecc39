"""Does every variant of the quickstart learn? Steps and seconds until its reward is 0.9, for several seeds.

    python benchmarks/recipes_learn.py [--recipes quickstart_ppo ...] [--seeds 0 1 2] [--set KEY=VALUE] [--out FILE]

Each run is `miles train` as a user starts it. The target is reached at the first step whose mean reward over five
steps is 0.9; seconds count the steps up to there, without the start of the processes. Prints a table (the one of
docs/benchmarks.md) and writes every run as JSON with date, hardware and command. Exit code 1 when a run misses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cpu_record

REPOSITORY = Path(__file__).resolve().parent.parent
TARGET, WINDOW = 0.9, 5
TIMEOUT_S = 900.0


def variants() -> list[str]:
    """Names of the quickstart and its variants, the quickstart first; the one with SGLang where its environment is."""
    names = sorted(path.stem for path in (REPOSITORY / "recipes").glob("quickstart*.yaml"))
    return [name for name in names if name != "quickstart_sglang" or (REPOSITORY / ".venv-sglang").is_dir()]


def learn(recipe: str, seed: int, sets: list[str], folder: Path) -> dict[str, Any]:
    """One run in a folder of its own; its curve's key figures. A run that breaks ends the benchmark with its output."""
    name = f"{recipe}-{seed}"
    options = [f"name={name}", f"seed={seed}", f"run.directory={folder}", "observe.trackers=[]", *sets]
    command = [sys.executable, "-m", "miles.cli", "train", str(REPOSITORY / "recipes" / f"{recipe}.yaml")]
    command += [word for option in options for word in ("--set", option)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": str(REPOSITORY)}
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    process_s = time.perf_counter() - started
    result = folder / name / "result.json"
    # Exit code 1 with a result: the run finished and misses the reward that its recipe expects.
    if done.returncode not in (0, 1) or not result.exists():
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {**figures(rows), "process_s": process_s, "digest": json.loads(result.read_text(encoding="utf-8"))["digest"]}


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a curve says: steps and seconds to the target (None: never), mean step, first and last reward."""
    rewards = [row["rollout/reward_mean"] for row in rows]
    means = [statistics.fmean(rewards[at - WINDOW : at]) for at in range(WINDOW, len(rewards) + 1)]
    hit = next((at + WINDOW for at, mean in enumerate(means) if mean >= TARGET), None)
    return {
        "steps_to_target": hit,
        "seconds_to_target": None if hit is None else sum(row["time/step"] for row in rows[:hit]),
        "step_ms": 1e3 * statistics.median(row["time/step"] for row in rows),
        "steps": len(rows),
        "reward_first": means[0],
        "reward_last": means[-1],
    }


def table(runs: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Markdown: one line a recipe, its seeds' steps and seconds to the target, step time and last reward."""

    def each(values: list[Any], form: str) -> str:
        return ", ".join("never" if value is None else format(value, form) for value in values)

    lines = ["| recipe | steps to 0.9 | seconds to 0.9 | ms a step | last reward |", "|---|---|---|---|---|"]
    for recipe, by_seed in runs.items():
        found = list(by_seed.values())
        lines.append(
            f"| `{recipe}` | {each([r['steps_to_target'] for r in found], 'd')} "
            f"| {each([r['seconds_to_target'] for r in found], '.1f')} "
            f"| {statistics.fmean(r['step_ms'] for r in found):.0f} "
            f"| {each([r['reward_last'] for r in found], '.3f')} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=variants(), default=variants(), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], help="override of every recipe, KEY=VALUE; repeatable")
    parser.add_argument("--out", type=Path, default=cpu_record.RESULTS / "recipes_learn.json")
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        **cpu_record.head(),
        "target": TARGET,
        "runs": {recipe: {} for recipe in arguments.recipes},
    }
    with tempfile.TemporaryDirectory() as folder:
        for recipe in arguments.recipes:
            for seed in arguments.seeds:
                run = learn(recipe, seed, arguments.set, Path(folder))
                record["runs"][recipe][str(seed)] = run
                print(
                    f"{recipe:26s} seed {seed}: 0.9 after {run['steps_to_target']} steps, reward "
                    f"{run['reward_first']:.2f} -> {run['reward_last']:.3f}, {run['step_ms']:.0f} ms a step",
                    flush=True,
                )
    print(table(record["runs"]))
    cpu_record.write(arguments.out, record)
    short = [name for name, seeds in record["runs"].items() for run in seeds.values() if run["reward_last"] < TARGET]
    return 1 if short else 0


if __name__ == "__main__":
    raise SystemExit(main())

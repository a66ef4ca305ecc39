"""GRPO from random weights on a CPU: `miles train` against TRL's GRPOTrainer, in one run.

Ours twice: recipes/quickstart.yaml (on policy, like TRL here) and recipes/quickstart_async.yaml (engine and trainer
work at the same time, samples are at most one weight version old).

Same task and scorer (copy three digits), same initial weights (TRL starts from the folder that our run created),
same prompts a step, group size, sampling, entropy bonus, learning rate, Adam betas, clipping, steps and threads per process. Both are
whole processes, watched from outside by one clock: a step's time is the time between two lines of its log.

    python benchmarks/grpo_cpu.py [--seeds 0 1 2] [--steps 200] [--out benchmarks/results/grpo_cpu.json]

Prints a table and the ratios and writes them as JSON with date, hardware and command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import cpu_record

from miles.recipe.loader import load

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES = {"ours": "quickstart.yaml", "ours-async": "quickstart_async.yaml"}
TARGET, WINDOW, SKIP = 0.9, 5, 10
TIMEOUT_S = 900.0
POLL_S = 0.004


class StepClock(threading.Thread):
    """Notes when each line of a growing file appears, in seconds since the process under watch was started."""

    def __init__(self, path: Path, started: float):
        super().__init__(daemon=True)
        self.times: list[float] = []
        self._path, self._origin = path, started
        self._over = threading.Event()

    def run(self) -> None:
        offset = 0
        while True:
            last = self._over.is_set()
            if self._path.exists() and self._path.stat().st_size > offset:
                now = time.perf_counter() - self._origin
                with self._path.open("rb") as file:
                    file.seek(offset)
                    chunk = file.read()
                offset += len(chunk)
                self.times += [now] * chunk.count(b"\n")
            if last:
                return
            time.sleep(POLL_S)

    def stop(self) -> list[float]:
        self._over.set()
        self.join()
        return self.times


def watched(command: list[str], log: Path, output: Path, steps: int) -> tuple[float, list[float], list[dict[str, Any]]]:
    """Run a command; (whole-process seconds, time of each step, rows of its log). A failure prints its output.

    Ours ends with 1 when the reward misses what the recipe expects: that is a result here, not a failure.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": str(REPOSITORY)}
    with output.open("w", encoding="utf-8") as file:
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT)
        clock = StepClock(log, started)
        try:
            clock.start()
            status = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        seconds = time.perf_counter() - started
    times = clock.stop()
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    if len(rows) != steps or status not in (0, 1):
        sys.exit(f"{' '.join(command)} ended with {status} after {len(rows)} steps:\n{output.read_text()[-4000:]}")
    return seconds, times, rows


def measure(times: list[float], rewards: list[float], process_s: float) -> dict[str, Any]:
    """`to_target_s` counts from the first step's end, so start-up is in `process_s` only."""
    steps = [b - a for a, b in itertools.pairwise(times)][SKIP:]
    hit = next(
        (i + 1 for i in range(WINDOW - 1, len(rewards)) if sum(rewards[i + 1 - WINDOW : i + 1]) / WINDOW >= TARGET),
        None,
    )
    return {
        "step_s": statistics.fmean(steps),
        "step_median_s": statistics.median(steps),
        "steps_to_target": hit,
        "to_target_s": None if hit is None else times[hit - 1] - times[0],
        "first_step_at_s": times[0],
        "target_at_s": None if hit is None else times[hit - 1],
        "process_s": process_s,
        "steps": len(rewards),
        "reward_first": statistics.fmean(rewards[:WINDOW]),
        "reward_last": statistics.fmean(rewards[-WINDOW:]),
    }


def run_ours(peer: str, seed: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    name = f"{peer}-{seed}"
    options = [f"seed={seed}", f"name={name}", f"run.steps={args.steps}", f"run.directory={folder}", *args.set]
    command = [str(Path(sys.executable).parent / "miles"), "train", str(REPOSITORY / "recipes" / RECIPES[peer])]
    command += [part for option in options for part in ("--set", option)]
    log = folder / name / "metrics.jsonl"
    seconds, times, rows = watched(command, log, folder / f"{name}.out", args.steps)
    return measure(times, [row["rollout/reward_mean"] for row in rows], seconds)


def same_settings(args: argparse.Namespace) -> list[str]:
    """The recipe's optimizer and loss in TRL's words; TRL has no form of what is refused here."""
    recipe = load(REPOSITORY / "recipes" / RECIPES["ours"], args.set)
    optimizer, algo = recipe.train.optimizer, recipe.algo
    loss = {"token_mean": "dapo", "rollout_mean": "grpo"}[algo.reduction]
    if optimizer.decay != "constant" or optimizer.weight_decay or algo.kl.where != "none":
        sys.exit("the recipe uses a decay, a weight decay or a KL term, which the peer script does not pass on")
    values = {
        "--lr": optimizer.lr,
        "--beta1": optimizer.betas[0],
        "--beta2": optimizer.betas[1],
        "--clip-grad": optimizer.clip_grad,
        "--warmup": optimizer.warmup_steps,
        "--entropy": algo.entropy_coef,
        "--prompts": recipe.rollout.batch_groups,
        "--group": recipe.rollout.group_size,
        "--new-tokens": recipe.rollout.max_new_tokens,
        "--digits": recipe.data.copy_digits.digits,
    }
    return ["--loss", loss, *(text for name, value in values.items() for text in (name, str(value)))]


def run_trl(peer: str, seed: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    log = folder / f"{peer}-{seed}.jsonl"
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "peers" / "trl_grpo.py"), "--seed", str(seed)]
    command += ["--steps", str(args.steps), "--out", str(log), "--model", str(folder / f"ours-{seed}" / "model")]
    command += [*same_settings(args), *args.trl]
    seconds, times, rows = watched(command, log, folder / f"trl-{seed}.out", args.steps)
    return measure(times, [row["reward_mean"] for row in rows], seconds)


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    reached = [r["to_target_s"] for r in runs if r["to_target_s"] is not None]
    return {
        "step_s": statistics.fmean(r["step_s"] for r in runs),
        "process_s": statistics.fmean(r["process_s"] for r in runs),
        "reached": len(reached),
        "to_target_s": statistics.fmean(reached) if reached else None,
    }


def show(name: str, seed: int, run: dict[str, Any]) -> None:
    target = "-" if run["to_target_s"] is None else f"{run['steps_to_target']:4d} steps {run['to_target_s']:6.1f} s"
    print(
        f"{name:10} seed {seed}  {run['step_s'] * 1e3:7.1f} ms/step (median {run['step_median_s'] * 1e3:.1f})  "
        f"to {TARGET}: {target:>20}  process {run['process_s']:6.1f} s  "
        f"reward {run['reward_first']:.2f} -> {run['reward_last']:.3f}",
        flush=True,
    )


PEERS = {"ours": run_ours, "ours-async": run_ours, "trl": run_trl}


def ratios(ours: dict[str, Any], trl: dict[str, Any]) -> dict[str, float | None]:
    """Ours over TRL's; below 1 is faster."""
    both = ours["reached"] and trl["reached"]
    return {
        "step_s": ours["step_s"] / trl["step_s"],
        "process_s": ours["process_s"] / trl["process_s"],
        "to_target_s": ours["to_target_s"] / trl["to_target_s"] if both else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], help="override of our recipe, KEY=VALUE; repeatable")
    parser.add_argument("--trl", nargs=argparse.REMAINDER, default=[], help="last: further options of the peer script")
    parser.add_argument("--out", type=Path, default=cpu_record.RESULTS / "grpo_cpu.json")
    args = parser.parse_args()
    record: dict[str, Any] = {
        **cpu_record.head(),
        "runs": {peer: {} for peer in PEERS},
    }
    with tempfile.TemporaryDirectory() as name:
        for seed in args.seeds:
            for peer, run in PEERS.items():
                record["runs"][peer][str(seed)] = result = run(peer, seed, args, Path(name))
                show(peer, seed, result)
    summary = {peer: summarise(list(runs.values())) for peer, runs in record["runs"].items()}
    record["summary"] = summary
    record["ratios"] = {peer: ratios(summary[peer], summary["trl"]) for peer in RECIPES}
    for peer, values in record["ratios"].items():
        print(f"{peer} / TRL: " + "  ".join(f"{k} {v:.2f}" for k, v in values.items() if v is not None))
    reached = ", ".join(f"{peer} {part['reached']}" for peer, part in summary.items())
    print(f"seeds that reached {TARGET} of {len(args.seeds)}: {reached}")
    cpu_record.write(args.out, record)


if __name__ == "__main__":
    main()

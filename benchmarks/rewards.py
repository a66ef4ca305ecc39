"""Rewards in worker processes beside a pool of threads, in one run: throughput, limits, hangs, and the end of the run.

    python benchmarks/rewards.py [--out FILE]

The alternative is what a thread pool gives: `ThreadPoolExecutor` of at most 8 threads, a time limit that counts from
the moment of submission, and a join of its threads at the end of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fast" / "miles" / "rollout" / "helpers"))
from judging import Texts, context, samples_of

from miles.rollout.errors import RewardError
from miles.rollout.rewards import RewardConfig, RewardPool, build_reward

SOURCE = """
import time
def sleeps(completion, answer, metadata):
    time.sleep(float(completion))
    return 1.0
"""
PATTERN = r"<answer>(?:\s|.)*?(?:[A-Za-z]+\s?)+</answer>"


async def in_workers(texts: Sequence[str], *, warm: bool = False, **config: Any) -> dict[str, float]:
    settings = RewardConfig(on_error="mask", **config)
    started = time.perf_counter()
    pool = RewardPool(settings, build_reward(settings), Texts(texts))
    pool.start()
    # A run starts its pool beside Ray: what judging costs is counted from a pool that is there (`warm`).
    samples = samples_of(texts)
    try:
        if warm:
            await pool.judge(context(), samples_of(texts[:1]))
        began = time.perf_counter()
        await pool.judge(context(), samples)
        ended = time.perf_counter()
    finally:
        pool.close()
    return {
        "start_s": began - started,
        "judging_s": ended - began,
        "close_s": time.perf_counter() - ended,
        "failed": pool.take_errors(),
    }


async def in_threads(texts: Sequence[str], function: Callable[[str], float], *, limit_s: float) -> dict[str, float]:
    threads, failed = ThreadPoolExecutor(8), 0
    began = time.perf_counter()

    async def one(text: str) -> None:
        nonlocal failed
        try:
            await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(threads, function, text), limit_s)
        except TimeoutError:
            failed += 1

    await asyncio.gather(*(one(text) for text in texts))
    judging_s = time.perf_counter() - began
    threads.shutdown(wait=False, cancel_futures=True)
    return {"judging_s": judging_s, "failed": failed}


def sleeps(text: str) -> float:
    time.sleep(float(text))
    return 1.0


def first_verdict_s(path: str) -> float:
    """From nothing to a reward of one's own: fork server, import, first worker."""
    result = asyncio.run(in_workers(["0"], kind="python", options={"path": path}))
    return result["start_s"] + result["judging_s"]


def end_of_process_s(body: str) -> float:
    """Seconds from the last line of a program to its end."""
    program = f"{body}\nimport time; print(time.time(), flush=True)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return time.time() - float(done.stdout.strip().splitlines()[-1])


HANGING_WORKERS = """
import sys; sys.path[:0] = {path!r}
import asyncio
from judging import Texts, context, samples_of
from miles.rollout.rewards import RewardConfig, RewardPool, build_reward
config = RewardConfig(kind="python", options={{"path": {reference!r}}}, timeout_s=0.5, on_error="mask")
pool = RewardPool(config, build_reward(config), Texts(["20"] * 8))
pool.start()
asyncio.run(pool.judge(context(), samples_of(["20"] * 8)))
pool.close()
"""
HANGING_THREADS = """
import time
from concurrent.futures import ThreadPoolExecutor
threads = ThreadPoolExecutor(8)
tasks = [threads.submit(time.sleep, 20) for _ in range(8)]
time.sleep(0.5)
threads.shutdown(wait=False, cancel_futures=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "timed_rewards.py").write_text(SOURCE)
        reference = f"python:{folder}/timed_rewards.py:sleeps"
        own = {"kind": "python", "options": {"path": reference}}

        rows["first verdict"] = {"ours_s": first_verdict_s(reference)}
        ideal = 512 * 0.3 / 64
        ours = asyncio.run(in_workers(["0.3"] * 512, warm=True, concurrency=64, **own))
        theirs = asyncio.run(in_threads(["0.3"] * 512, sleeps, limit_s=60))
        rows["512 rewards of 0.3 s at concurrency 64"] = {
            "ours_s": ours["judging_s"],
            "threads_s": theirs["judging_s"],
            "ideal_s": ideal,
            "ours_of_ideal": ours["judging_s"] / ideal,
        }
        ours = asyncio.run(in_workers(["0.3"] * 64, concurrency=64, timeout_s=1.0, **own))
        theirs = asyncio.run(in_threads(["0.3"] * 64, sleeps, limit_s=1.0))
        rows["64 rewards of 0.3 s at limit 1 s"] = {"ours_failed": ours["failed"], "threads_failed": theirs["failed"]}

        hangs = ["20"] * 8 + ["0.1"] * 8
        ours = asyncio.run(in_workers(hangs, concurrency=8, timeout_s=1.0, **own))
        rows["8 that hang, then 8 of 0.1 s, at concurrency 8"] = {
            "ours_s": ours["judging_s"],
            "ours_failed": ours["failed"],
            "close_s": ours["close_s"],
        }
        text = "<answer>" + "a" * 29
        ours = asyncio.run(
            in_workers([text], kind="regex", options={"pattern": PATTERN, "compare": False}, timeout_s=1.0)
        )
        began = time.perf_counter()
        with contextlib.suppress(RewardError):
            re.search(PATTERN, "<answer>" + "a" * 22)
        rows["a pattern without end, limit 1 s"] = {
            "ours_s": ours["judging_s"],
            "re_22_letters_s": time.perf_counter() - began,
        }
        rows["end of the process after 8 that hang"] = {
            "ours_s": end_of_process_s(HANGING_WORKERS.format(path=sys.path, reference=reference)),
            "threads_s": end_of_process_s(HANGING_THREADS),
        }
    for name, row in rows.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

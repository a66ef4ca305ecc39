"""How many answers the math judge takes a second, and how often it agrees with SymPy's own full power.

    python benchmarks/math_judge.py [--pairs 5000] [--workers 2] [--seed 0] [--rate-only] [--out FILE]

Pairs are made as SymPy objects, rewritten (equal) or changed (unequal), and printed as LaTeX or as plain text. SymPy judges
the objects (`simplify` of the difference, then `equals`), which never passed our grammar; ours judges the text. Pairs
that SymPy does not decide within `--limit` seconds are counted apart. The alternative in the same run: one SymPy
`simplify` a pair on the objects, parsing left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fast" / "miles" / "rollout" / "helpers"))
import sympy_pairs

from miles.rollout.math_answers.judge import make as make_judge
from miles.rollout.rewards import RewardConfig, build_reward
from miles.rollout.rewards.processes import WorkerProcesses


def processor_time_s() -> float:
    """Of this process and its ended children: what the load of the machine does not change."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def rate(texts: list[tuple[str, str]], workers: int) -> tuple[float, float]:
    """(answers a second, seconds from nothing to the first verdict) of `workers` processes."""
    fn = build_reward(RewardConfig(kind="math_boxed"))
    assert fn.worker is not None
    started = time.perf_counter()
    processes = WorkerProcesses(fn.worker, memory_gib=2.0)
    processes.start()
    waiting = iter(texts)

    async def ask(found: str, wanted: str) -> float:
        completion = f"so \\boxed{{{found}}}"
        quick = fn.quick(completion, wanted) if fn.quick is not None else None
        if quick is not None:
            return quick
        total, _ = await processes.call(completion=completion, answer=wanted, metadata={}, seed_text="", timeout_s=5.0)
        return total

    async def one() -> None:
        for found, wanted in waiting:
            await ask(found, wanted)

    try:
        await processes.call(completion=r"\boxed{x}", answer="y", metadata={}, seed_text="", timeout_s=5.0)
        first = time.perf_counter() - started
        started = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(workers)))
        return len(texts) / (time.perf_counter() - started), first
    finally:
        processes.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=10.0)
    parser.add_argument("--rate-only", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pairs = list(sympy_pairs.generate(arguments.pairs, seed=arguments.seed))
    texts = [(pair.found, pair.wanted) for pair in pairs]
    before = processor_time_s()
    per_second, first = asyncio.run(rate(texts, arguments.workers))
    cost_ms = (processor_time_s() - before) / len(texts) * 1e3
    result = {"pairs": len(pairs), "answers_per_s": per_second, "first_verdict_s": first, "processor_ms": cost_ms}
    print(f"{len(pairs)} pairs, {arguments.workers} workers: {per_second:.0f} answers/s, first verdict {first:.2f} s")
    print(f"processor time, driver and start included: {cost_ms:.2f} ms an answer")
    if not arguments.rate_only:
        judge = make_judge()
        agreed, undecided, sympy_s, wrong = 0, 0, 0.0, []
        for pair in pairs:
            started = time.perf_counter()
            truth = sympy_pairs.sympy_verdict(pair, limit_s=arguments.limit)
            sympy_s += time.perf_counter() - started
            if truth is None:
                undecided += 1
                continue
            ours = bool(judge(f"\\boxed{{{pair.found}}}", pair.wanted, {}))
            agreed += ours == truth
            if ours != truth:
                wrong.append({"found": pair.found, "wanted": pair.wanted, "ours": ours, "sympy": truth})
        decided = len(pairs) - undecided
        share = agreed / max(decided, 1)
        print(f"SymPy alone: {len(pairs) / sympy_s:.0f} answers/s in one process, {undecided} undecided")
        print(f"agreement: {agreed} of {decided} ({share:.2%})")
        for row in wrong:
            print(f"  ours {row['ours']!s:5}  sympy {row['sympy']!s:5}  {row['found']}   |   {row['wanted']}")
        result |= {"agreed": agreed, "decided": decided, "sympy_per_s": len(pairs) / sympy_s, "differ": wrong}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Log-probs of given tokens from bf16 logits on one GPU, forward + backward: ours and the alternatives, one run.

    python benchmarks/log_probs.py                 # table with share of the physical limit
    python benchmarks/log_probs.py --tune          # launch shapes first, best ones used in the table
    python benchmarks/log_probs.py --once fused    # one launch, for a profiler

Bytes: as an autograd primitive the logits must be read twice and the gradient written once; fused with the
policy loss, the second read can come from L2. The limit is those bytes at the copy bandwidth of this machine,
measured in the same run (read + write counted). Alternatives: naive fp32 log-softmax, torch.compile of gather
minus logsumexp, Liger's cross entropy when it is installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_timing import GIB, copy_and_fill_ms, extra_memory, header, measure, write

from miles.algos.log_probs import vocab_parallel_scores
from miles.kernels.log_probs import PolicyTerm, fused_policy_loss, logits_gradient, row_stats
from miles.kernels.log_probs.ops import DEFAULT_TUNING, Tuning


class Problem:
    def __init__(self, rows: int, vocab: int) -> None:
        torch.manual_seed(0)
        self.rows, self.vocab = rows, vocab
        self.logits = torch.empty((rows, vocab), dtype=torch.bfloat16, device="cuda").normal_(std=3.0)
        self.leaf = self.logits.detach().requires_grad_(True)
        self.targets = torch.randint(0, vocab, (rows,), device="cuda")
        self.slope = torch.randn(rows, device="cuda")
        # Close to the current policy, so that no row is clipped and every row has a gradient to write.
        stats = row_stats(self.logits, self.targets, valid=vocab)
        self.old = stats.target - stats.maximum - stats.total.log() + 0.01 * torch.randn(rows, device="cuda")
        self.term = PolicyTerm(
            torch.randn(rows, device="cuda"), torch.full((rows,), 1.0 / rows, device="cuda"), self.old
        )

    def ours(self, entropy: str = "none") -> torch.Tensor:
        log_probs, full = vocab_parallel_scores(self.leaf, self.targets, vocab_size=self.vocab, entropy=entropy)
        loss = (log_probs * self.slope).sum()
        if full is not None and entropy == "gradient":
            loss = loss + 0.01 * full.sum()
        return torch.autograd.grad(loss, self.leaf)[0]

    def picked(self, *, inside: bool) -> torch.Tensor:
        """Every second row has a target: rows picked inside the pass, or copied out first."""
        rows = torch.arange(0, self.rows, 2, device="cuda")
        targets = self.targets[rows]
        logits = self.leaf if inside else self.leaf.index_select(0, rows)
        log_probs, _ = vocab_parallel_scores(logits, targets, vocab_size=self.vocab, rows=rows if inside else None)
        return torch.autograd.grad((log_probs * self.slope[rows]).sum(), self.leaf)[0]

    def fused(self, tuning: Tuning = DEFAULT_TUNING, inplace: bool = False) -> torch.Tensor:
        return fused_policy_loss(
            self.logits, self.targets, self.term, valid=self.vocab, tuning=tuning, inplace=inplace
        )[2]

    def naive(self) -> torch.Tensor:
        log_probs = self.leaf.float().log_softmax(-1).gather(1, self.targets[:, None])[:, 0]
        return torch.autograd.grad((log_probs * self.slope).sum(), self.leaf)[0]


def compiled(problem: Problem) -> Callable[[], torch.Tensor]:
    @torch.compile
    def log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        z = logits.float()
        return z.gather(1, targets[:, None])[:, 0] - z.logsumexp(-1)

    def call() -> torch.Tensor:
        out = log_probs(problem.leaf, problem.targets)
        return torch.autograd.grad((out * problem.slope).sum(), problem.leaf)[0]

    return call


def liger(problem: Problem) -> Callable[[], object] | None:
    try:
        from liger_kernel.transformers.functional import liger_cross_entropy
    except ImportError as error:
        print(f"liger-kernel: not measured ({error})")
        return None
    # It writes the gradient over its input: from the second call on the numbers differ, the work does not.
    scratch = problem.logits.clone().requires_grad_(True)

    def call() -> object:
        loss = liger_cross_entropy(scratch, problem.targets, reduction="mean")
        return torch.autograd.grad(loss, scratch)[0]

    return call


def tune(problem: Problem) -> Tuning:
    """Time launch shapes of each kernel; returns the best."""
    best = DEFAULT_TUNING
    lse = torch.full((problem.rows,), 14.0, device="cuda")

    def stats(t: Tuning) -> None:
        row_stats(problem.logits, problem.targets, valid=problem.vocab, tuning=t)

    def gradient(t: Tuning) -> None:
        logits_gradient(problem.logits, problem.targets, lse, problem.slope, valid=problem.vocab, tuning=t)

    def fused(t: Tuning) -> None:
        problem.fused(t)

    grids: list[tuple[Callable[[Tuning], None], tuple[str, ...], tuple[tuple[Any, ...], ...]]] = [
        (stats, ("stats_warps", "stats_depth"), ((4, 4), (4, 8), (8, 4), (8, 8))),
        (
            gradient,
            ("gradient_warps", "gradient_block"),
            ((2, 1024), (4, 1024), (4, 2048), (8, 2048), (4, 4096), (8, 4096), (8, 8192), (8, 16384)),
        ),
        (
            fused,
            ("fused_warps", "fused_depth", "fused_programs_per_sm"),
            ((16, 4, 2), (16, 2, 2), (16, 8, 2), (8, 8, 2), (8, 16, 2), (8, 4, 3), (32, 4, 1)),
        ),
    ]
    for call, names, shapes in grids:
        results = []
        for values in shapes:
            shape = dict(zip(names, values, strict=True))
            candidate = replace(best, **shape)
            milliseconds, spread = measure(lambda c=candidate, f=call: f(c), repeats=9)  # type: ignore[misc]
            results.append((milliseconds, shape))
            print(f"tune {milliseconds:7.3f} ms (+-{spread:.3f})  {shape}", flush=True)
        best = replace(best, **min(results, key=lambda r: r[0])[1])
    return best


def check(problem: Problem) -> None:
    """The kernels against float64 on a few rows of this very problem."""
    rows = slice(0, 16)
    exact = problem.logits[rows].double().requires_grad_(True)
    log_probs = exact.log_softmax(-1).gather(1, problem.targets[rows, None])[:, 0]
    (grad,) = torch.autograd.grad((log_probs * problem.slope[rows].double()).sum(), exact)
    stats = row_stats(problem.logits, problem.targets, valid=problem.vocab)
    mine = stats.target - stats.maximum - stats.total.log()
    error = float((mine[rows].double() - log_probs.detach()).abs().max())
    ours = problem.ours()[rows].double()
    relative = float((ours - grad).norm() / grad.norm())
    print(f"check: log-prob error {error:.2e}, gradient relative error {relative:.2e} (bf16 rounding is 2e-3)")
    assert error < 1e-4
    assert relative < 5e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--once", choices=["primitive", "fused"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/log_probs.py needs a GPU; the CPU path is measured by tests only", file=sys.stderr)
        return 2
    problem = Problem(arguments.rows, arguments.vocab)
    if arguments.once:
        problem.ours("value") if arguments.once == "primitive" else problem.fused()
        torch.cuda.synchronize()
        return 0
    check(problem)
    tuning = tune(problem) if arguments.tune else DEFAULT_TUNING
    print(tuning)
    logits_bytes = arguments.rows * arguments.vocab * 2
    bandwidth = 2 * logits_bytes / (copy_and_fill_ms(logits_bytes)[0] * 1e-3)
    primitive_limit = 3 * logits_bytes / bandwidth * 1e3
    fused_limit = 2 * logits_bytes / bandwidth * 1e3
    print(
        f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s; {arguments.rows} x {arguments.vocab} bf16"
    )
    cases: list[tuple[str, Callable[[], object] | None, float]] = [
        ("ours: log-probs", problem.ours, primitive_limit),
        ("ours: log-probs + entropy value", lambda: problem.ours("value"), primitive_limit),
        ("ours: log-probs + entropy gradient", lambda: problem.ours("gradient"), primitive_limit),
        ("ours: fused policy loss", lambda: problem.fused(tuning), fused_limit),
        # Half of the rows read twice, the whole gradient written once.
        ("ours: every second row, picked inside", lambda: problem.picked(inside=True), fused_limit),
        ("ours: every second row, copied first", lambda: problem.picked(inside=False), fused_limit),
        ("naive fp32 log-softmax", problem.naive, primitive_limit),
        ("torch.compile gather - logsumexp", compiled(problem), primitive_limit),
        ("liger cross entropy (gradient in place)", liger(problem), primitive_limit),
    ]
    table = []
    for name, call, limit in cases:
        if call is None:
            continue
        milliseconds, spread = measure(call)
        extra = extra_memory(call)
        torch.cuda.empty_cache()
        row = {
            "name": name,
            "ms": milliseconds,
            "spread_ms": spread,
            "extra_gib": extra / GIB,
            "extra_beyond_gradient_mib": (extra - logits_bytes) / (1 << 20),
            "limit_ms": limit,
            "share_of_limit": limit / milliseconds,
        }
        table.append(row)
        print(
            f"{name:40s} {milliseconds:7.3f} ms (+-{spread:.3f})  extra {extra / GIB:6.2f} GiB "
            f"(gradient {row['extra_beyond_gradient_mib']:+9.1f} MiB)  limit {limit:.2f} ms  {limit / milliseconds:5.0%}",
            flush=True,
        )
    ours = {row["name"]: row["ms"] for row in table}
    ratios = {name: ms / ours["ours: log-probs"] for name, ms in ours.items() if not name.startswith("ours")}
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}x the time of ours")
    record = {"tuning": asdict(tuning), "copy_tb_s": bandwidth / 1e12, "cases": table, "ratio_to_ours": ratios}
    write({**header(), "unit": "ms", **record}, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

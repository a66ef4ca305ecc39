"""Log-probs on the sampler's support on one GPU: CSR gather against a dense mask, forward + backward, one run.

    python benchmarks/support_log_probs.py [--rows 8192] [--vocab 151936] [--mean-support 64]

The physical limit of the sparse form is one write of the gradient (zeros and the support's entries), since only
the support's logits are read; the dense form reads the logits and the mask and writes masked logits besides.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_timing import GIB, copy_and_fill_ms, extra_memory, header, measure, write

from miles.algos.log_probs import vocab_parallel_scores
from miles.algos.sampling_mask import support_log_probs


def supports(rows: int, vocab: int, mean: int) -> tuple[torch.Tensor, torch.Tensor]:
    """CSR ids and offsets: geometric widths around `mean`, distinct ids inside a row."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    uniform = torch.rand(rows, device="cuda", generator=generator).clamp(1e-6, 1 - 1e-6)
    counts = (-uniform.log() * (mean - 1)).long().clamp(0, 8 * mean) + 1
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    within = torch.arange(int(offsets[-1]), device="cuda") - torch.repeat_interleave(offsets[:-1], counts)
    starts = torch.randint(0, vocab, (rows,), device="cuda", generator=generator)
    # 7919 is prime and vocab is not a multiple of it: a row's ids are distinct and spread out.
    return (torch.repeat_interleave(starts, counts) + within * 7919) % vocab, offsets


def support_log_probs_dense(
    logits: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, *, vocab_size: int
) -> torch.Tensor:
    """The alternative: mask the logits to -inf outside the support."""
    outside = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    outside[torch.repeat_interleave(torch.arange(len(logits), device=logits.device), offsets.diff()), ids] = False
    return vocab_parallel_scores(logits.masked_fill(outside, -torch.inf), targets, vocab_size=vocab_size)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--mean-support", type=int, default=64)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/support_log_probs.py needs a GPU", file=sys.stderr)
        return 2
    rows, vocab = arguments.rows, arguments.vocab
    torch.manual_seed(0)
    logits = torch.empty((rows, vocab), dtype=torch.bfloat16, device="cuda").normal_(std=3.0).requires_grad_(True)
    ids, offsets = supports(rows, vocab, arguments.mean_support)
    targets = ids[offsets[:-1]]
    slope = torch.randn(rows, device="cuda")

    def sparse() -> torch.Tensor:
        out = support_log_probs(logits, targets, ids, offsets, vocab_size=vocab)
        return torch.autograd.grad((out * slope).sum(), logits)[0]

    def dense() -> torch.Tensor:
        out = support_log_probs_dense(logits, targets, ids, offsets, vocab_size=vocab)
        return torch.autograd.grad((out * slope).sum(), logits)[0]

    difference = float((sparse().float() - dense().float()).abs().max())
    copied, written = copy_and_fill_ms(2 * rows * vocab)
    print(
        f"{torch.cuda.get_device_name()}: {rows} x {vocab} bf16, mean |S| {len(ids) / rows:.1f}; "
        f"copy {4 * rows * vocab / copied / 1e9:.2f} TB/s, fill {2 * rows * vocab / written / 1e9:.2f} TB/s; "
        f"largest gradient difference {difference:.1e}"
    )
    results = {}
    for name, call in (("sparse", sparse), ("dense mask", dense)):
        milliseconds, spread = measure(call)
        with torch.no_grad():
            forward = measure(
                (lambda: support_log_probs(logits, targets, ids, offsets, vocab_size=vocab))
                if name == "sparse"
                else (lambda: support_log_probs_dense(logits, targets, ids, offsets, vocab_size=vocab))
            )[0]
        results[name] = {
            "ms": milliseconds,
            "spread_ms": spread,
            "forward_ms": forward,
            "peak_bytes": extra_memory(call),
        }
        torch.cuda.empty_cache()
        print(
            f"{name:11s} {milliseconds:7.3f} ms (+-{spread:.3f}), forward alone {forward:7.3f} ms, "
            f"peak {results[name]['peak_bytes'] / GIB:6.2f} GiB, limit {written:.2f} ms: {written / milliseconds:4.0%}",
            flush=True,
        )
    ratio = results["dense mask"]["ms"] / results["sparse"]["ms"]
    memory = results["dense mask"]["peak_bytes"] / results["sparse"]["peak_bytes"]
    print(f"dense / sparse: {ratio:.2f}x time, {memory:.2f}x peak memory")
    record = {"cases": results, "copy_ms": copied, "fill_ms": written, "time_ratio": ratio, "memory_ratio": memory}
    write({**header(), "unit": "ms", "mean_support": len(ids) / rows, **record}, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

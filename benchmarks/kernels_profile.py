"""What limits the kernels: one profiled launch of each, hardware counters from Nsight Compute.

    python benchmarks/kernels_profile.py --out benchmarks/results/kernels_profile.json

Starts itself under `ncu --clock-control none` (clocks are left as they are) and keeps a few counters of each launch:
share of the peak of DRAM, L2, the SMs and their issue slots, bytes to and from DRAM, registers, occupancy. A profiled launch starts with
cold caches and is serialised, so its time is not the benchmark's.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

METRICS = {
    "us": "gpu__time_duration.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1_percent": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu_percent": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma_percent": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "registers": "launch__registers_per_thread",
}
# The launches of `launch_once`, in order.
LAUNCHES = (
    "nvfp4 maxima",
    "nvfp4 standard, maxima given",
    "nvfp4 4over6 exact MSE",
    "nvfp4 4over6 exact MAE",
    "mxfp4_to_fp8, 16 weights",
    "log-probs: row statistics",
    "log-probs: gradient",
    "log-probs: fused with the policy loss",
)
KERNELS = "qdq_kernel|amax_kernel|tile_kernel|stats_kernel|gradient_kernel|fused_kernel"


def launch_once() -> None:
    """Each kernel with its default launch shape, after a warm-up that compiles it."""
    from miles.kernels.log_probs import PolicyTerm, fused_policy_loss, logits_gradient, row_stats
    from miles.kernels.mxfp4_to_fp8 import api as mxfp4
    from miles.kernels.nvfp4_qdq import api as nvfp4
    from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig

    torch.manual_seed(0)
    weights = [torch.randn((4096, 6144), device="cuda").mul_(0.02).to(torch.bfloat16) for _ in range(8)]
    packed = [torch.randint(0, 256, (4096, 3072), dtype=torch.uint8, device="cuda") for _ in range(16)]
    scales = [torch.randint(118, 124, (4096, 192), dtype=torch.uint8, device="cuda") for _ in range(16)]
    rows, vocab = 8192, 151_936
    logits = torch.empty((rows, vocab), dtype=torch.bfloat16, device="cuda").normal_(std=3.0)
    targets = torch.randint(0, vocab, (rows,), device="cuda")
    ones = torch.ones(rows, device="cuda")

    def work() -> None:
        amax = nvfp4.amax_nvfp4(weights)
        nvfp4.qdq_nvfp4(weights, NVFP4QDQConfig(), amax)
        nvfp4.qdq_nvfp4(weights, NVFP4QDQConfig(True, error_mode=ErrorMode.MSE), amax)
        nvfp4.qdq_nvfp4(weights, NVFP4QDQConfig(True), amax)
        mxfp4.mxfp4_to_fp8(packed, scales)
        stats = row_stats(logits, targets, valid=vocab)
        old = stats.target - stats.maximum - stats.total.log()
        logits_gradient(logits, targets, stats.maximum + stats.total.log(), ones, valid=vocab)
        fused_policy_loss(logits, targets, PolicyTerm(ones, ones / rows, old), valid=vocab)

    work()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    work()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def limit(counters: dict[str, float]) -> str:
    """The unit nearest to its peak, and the next one."""
    names = {"dram_percent": "DRAM", "l2_percent": "L2", "issue_percent": "instruction issue", "alu_percent": "integer and logic pipe", "fma_percent": "fp32 pipe"}  # fmt: skip
    first, second = sorted(names, key=lambda name: -counters[name])[:2]
    return f"{names[first]} ({counters[first]:.0f} % of peak), then {names[second]} ({counters[second]:.0f} %)"


def profile() -> list[dict]:
    command = [
        "ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base",
        "-k", f"regex:{KERNELS}", "--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--launch",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        raise SystemExit(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    header, _units, *rows = csv.reader(lines)
    found = []
    for launch, row in zip(LAUNCHES, rows, strict=True):
        values = dict(zip(header, row, strict=True))
        counters = {name: float(values[metric].replace(",", "")) for name, metric in METRICS.items()}
        counters["us"] /= 1e3
        found.append({"launch": launch, "kernel": values["Kernel Name"], **counters, "limit": limit(counters)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels_profile needs a CUDA GPU")
    if args.launch:
        return launch_once()
    if shutil.which("ncu") is None:
        raise SystemExit("kernels_profile needs Nsight Compute: `ncu` is not on the PATH")
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name(),
        "command": "python benchmarks/kernels_profile.py",
        "shapes": "8 weights 4096 x 6144 bf16 (nvfp4), 16 (mxfp4), logits 8192 x 151936 bf16",
        "kernels": profile(),
    }
    print(json.dumps(record, indent=1))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

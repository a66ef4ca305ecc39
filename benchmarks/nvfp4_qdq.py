"""NVFP4 quantise-dequantise of 8 weights of 4096 x 6144 bf16 on one GPU: ours, the alternatives, one run.

    python benchmarks/nvfp4_qdq.py --out benchmarks/results/nvfp4_qdq.json [--tune]

Floor: each element read once and written once (402.7 MB each way) at the copy bandwidth measured in the same run;
with the maxima included a separate pass over HBM adds a read. Alternatives: the plain-torch reference eagerly and
under torch.compile, and three separate kernels a weight (maximum, quantise to packed form, dequantise). Every result
is checked for equal bits against the reference before it is timed. Times are medians of event-timed calls, and of
graph replays where the call can be captured.
"""

# ruff: noqa: RUF005  (the Triton front end has no starred tuples)
from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_timing import graph_us, header, time_us, write

from miles.kernels.nvfp4_qdq import api, arithmetic, choice, reference, tiles
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig

SHAPE, COUNT = (4096, 6144), 8
STANDARD = NVFP4QDQConfig()
VARIANTS = {
    "4over6 fp16 MSE": NVFP4QDQConfig(use_4over6=True, error_mode=ErrorMode.MSE, error_use_fast_math=True),
    "4over6 fp16 MAE": NVFP4QDQConfig(use_4over6=True, error_use_fast_math=True),
    "4over6 exact MSE": NVFP4QDQConfig(use_4over6=True, error_mode=ErrorMode.MSE),
    "4over6 exact MAE": NVFP4QDQConfig(use_4over6=True),
    "4over6 256 exact MAE": NVFP4QDQConfig(use_4over6=True, e4m3_max=256),
}


@triton.jit
def quantize_kernel(src, codes, scales, amax_bits, slot, blocks, numerator, ROWS: tl.constexpr):
    """Packed E2M1 and E4M3 bytes of one weight: the middle one of the separate kernels."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first, second = tiles.load_tile(src, tl.program_id(0).to(tl.int64) * ROWS, blocks, ROWS, "")
    x = tiles.words_of(first, second, ROWS)
    m = arithmetic.row_magnitudes(x, False)
    amax = tl.load(amax_bits + slot).to(tl.float32, bitcast=True)
    s_enc, s_dec = arithmetic.tensor_scales(amax, numerator)
    q, scale = choice.quantize_standard(m, arithmetic.max_bits(m).to(tl.float32, bitcast=True), s_enc, s_dec, True)
    words = ()
    for half in tl.static_range(2):
        packed = row * 0
        for i in tl.static_range(8):
            r = q[8 * half + i]
            code = tl.where(r < 1.0, (2.0 * r).to(tl.int32), (r.to(tl.int32, bitcast=True) >> 22) - 252)
            sign = (x[4 * half + i // 2] >> (15 + 16 * (i % 2))) & 1
            packed = packed | ((code | (sign << 3)) << (4 * i))
        words = words + (packed,)
    pair = tl.join(words[0], words[1])
    tl.store(codes + row[:, None] * 2 + tl.arange(0, 2)[None, :], pair, mask=(row < blocks)[:, None])
    bits = scale.to(tl.int32, bitcast=True)
    byte = tl.where(scale < 0.015625, (scale * 512.0).to(tl.int32), (bits >> 20) - 960)
    tl.store(scales + row, byte.to(tl.uint8), mask=row < blocks)


@triton.jit
def dequantize_kernel(codes, scales, dst, amax_bits, slot, blocks, recip, ROWS: tl.constexpr):
    """bf16 of packed codes: the last one of the separate kernels."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < blocks)[:, None]
    byte = tl.load(scales + row, mask=row < blocks, other=0).to(tl.int32)
    scale = tl.where(
        byte < 8, byte.to(tl.float32) * 0.001953125, ((byte << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    )
    factor = (scale * tl.load(amax_bits + slot).to(tl.float32, bitcast=True)) * recip
    for half in tl.static_range(2):
        word = tl.load(codes + row * 2 + half, mask=row < blocks, other=0)
        out = ()
        for i in tl.static_range(4):
            m = (word >> (8 * i)) & 7
            low = (
                tl.where(m < 2, m.to(tl.float32) * 0.5, ((m << 22) + (126 << 23)).to(tl.float32, bitcast=True)) * factor
            )
            m = (word >> (8 * i + 4)) & 7
            high = (
                tl.where(m < 2, m.to(tl.float32) * 0.5, ((m << 22) + (126 << 23)).to(tl.float32, bitcast=True)) * factor
            )
            signs = (((word >> (8 * i + 3)) & 1) << 15) | (((word >> (8 * i + 7)) & 1) << 31)
            out = out + (arithmetic.pack(low, high, False, True) | signs,)
        target = dst + row[:, None] * 8 + half * 4 + tl.arange(0, 4)[None, :]
        tl.store(target, tiles.join4(out[0], out[1], out[2], out[3], ROWS), mask=mask)


class Separate:
    """Maximum, quantise, dequantise: three launches a weight, packed form through HBM."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights = weights
        self.blocks = weights[0].numel() // 16
        self.codes = torch.empty(self.blocks * 2, dtype=torch.int32, device="cuda")
        self.scales = torch.empty(self.blocks, dtype=torch.uint8, device="cuda")
        self.out = [torch.empty_like(w) for w in weights]

    def __call__(self) -> list[torch.Tensor]:
        n = STANDARD.encode_numerator
        for w, y in zip(self.weights, self.out, strict=True):
            amax = api.amax_nvfp4([w]).view(torch.int32)
            source, target = w.view(-1).view(torch.int32), y.view(-1).view(torch.int32)
            quantize_kernel[(triton.cdiv(self.blocks, 128),)](source, self.codes, self.scales, amax, 0, self.blocks, n, ROWS=128, enable_fp_fusion=False)  # fmt: skip
            dequantize_kernel[(triton.cdiv(self.blocks, 128),)](self.codes, self.scales, target, amax, 0, self.blocks, 1.0 / n, ROWS=128, enable_fp_fusion=False)  # fmt: skip
        return self.out


def equal_bits(got: list[torch.Tensor], weights: list[torch.Tensor], config: NVFP4QDQConfig) -> int:
    """Elements that differ from the reference."""
    bad = 0
    for g, w in zip(got, weights, strict=True):
        amax = reference.tensor_amax(w)
        for part, rows in zip(g.split(512), w.split(512), strict=True):
            bad += int((part.view(torch.int16) != reference.qdq(rows, config, amax).view(torch.int16)).sum())
    return bad


def tune(weights: list[torch.Tensor], amax: torch.Tensor) -> dict:
    """Launch shapes, best first."""

    def best_first(times: dict) -> dict:
        return dict(sorted(times.items(), key=lambda item: item[1]))

    tables: dict = {name: {} for name in ("standard", "4over6 fp16 MSE", "4over6 exact MSE", "4over6 exact MAE")}
    for name, cut, warps, ahead in itertools.product(tables, (4, 8, 16), (1, 2, 4), (False, True)):
        launch, config = api.Launch(32 * warps, cut, warps, True, ahead), VARIANTS.get(name, STANDARD)
        tables[name][str(launch)] = graph_us(
            lambda launch=launch, config=config: api.qdq_nvfp4(weights, config, amax, launch=launch), 15
        )
    return {name: best_first(times) for name, times in tables.items()}


def measure(weights: list[torch.Tensor], fast: bool) -> dict:
    amax = api.amax_nvfp4(weights)
    copies = [torch.empty_like(w) for w in weights]
    flat, target = (
        torch.cat([w.view(-1) for w in weights]),
        torch.empty(sum(w.numel() for w in weights), dtype=torch.bfloat16, device="cuda"),
    )
    separate = Separate(weights)
    checks = {
        "standard": equal_bits(api.qdq_nvfp4(weights, STANDARD), weights, STANDARD),
        "separate": equal_bits(separate(), weights, STANDARD),
        **{n: equal_bits(api.qdq_nvfp4(weights, c), weights, c) for n, c in VARIANTS.items()},
    }
    one_copy = graph_us(lambda: target.copy_(flat))
    result = {
        "elements that differ from the reference": checks,
        "copy, one tensor": one_copy,
        "copy, 8 tensors": graph_us(lambda: [c.copy_(w) for c, w in zip(copies, weights, strict=True)]),
        "ours, amax given": graph_us(lambda: api.qdq_nvfp4(weights, STANDARD, amax)),
        "ours, amax given, plain call": time_us(lambda: api.qdq_nvfp4(weights, STANDARD, amax)),
        "ours, amax alone": graph_us(lambda: api.amax_nvfp4(weights)),
        "ours, amax included": graph_us(lambda: api.qdq_nvfp4(weights, STANDARD)),
        "ours, amax included, plain call": time_us(lambda: api.qdq_nvfp4(weights, STANDARD)),
        "separate kernels": graph_us(separate),
    }
    for name, config in VARIANTS.items():
        result[f"{name}, amax given"] = graph_us(lambda config=config: api.qdq_nvfp4(weights, config, amax))
    # Multiples of a half: in most tiles some block's errors are too near to each other for the quick choice.
    ties = [(torch.randint(-24, 25, SHAPE, device="cuda") * 0.5).to(torch.bfloat16) for _ in weights]
    exact, ties_amax = VARIANTS["4over6 exact MSE"], api.amax_nvfp4(ties)
    checks["4over6 exact MSE, ties everywhere"] = equal_bits(api.qdq_nvfp4(ties, exact), ties, exact)
    result["4over6 exact MSE, ties everywhere"] = graph_us(lambda: api.qdq_nvfp4(ties, exact, ties_amax))
    if not fast:
        result["eager reference"] = time_us(lambda: [reference.qdq(w, STANDARD) for w in weights], 5)
        compiled = torch.compile(lambda w: reference.qdq(w, STANDARD))
        result["compiled reference"] = time_us(lambda: [compiled(w) for w in weights], 10)
        result["elements where the compiled reference differs"] = equal_bits(
            [compiled(w) for w in weights], weights, STANDARD
        )
    gigabytes = 2 * flat.numel() * 2 / 1e9
    result["copy TB/s"] = gigabytes / one_copy * 1e3
    result["share of floor, amax given"] = one_copy / result["ours, amax given"]
    others = [n for n in ("separate kernels", "eager reference", "compiled reference") if n in result]
    result["ratio to ours, amax included"] = {n: result[n] / result["ours, amax included"] for n in others}
    result["ratio 4over6 / standard"] = {n: result[f"{n}, amax given"] / result["ours, amax given"] for n in VARIANTS}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--fast", action="store_true", help="without the eager and compiled references")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("nvfp4_qdq needs a CUDA GPU; the interpreter's time says nothing about a GPU")
    torch.manual_seed(0)
    weights = [torch.randn(SHAPE, device="cuda").mul_(0.02).to(torch.bfloat16) for _ in range(COUNT)]
    record = {**header(), "unit": "us"}
    if args.tune:
        record["tune"] = tune(weights, api.amax_nvfp4(weights))
    record["results"] = measure(weights, args.fast)
    api.raise_if_flagged()
    write(record, args.out)


if __name__ == "__main__":
    main()

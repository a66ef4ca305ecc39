"""Codecs against libraries that nobody here wrote, on more than ten million values: differences must be zero.

    python benchmarks/codec_oracles.py --values 12000000 --out benchmarks/results/codec_oracles.json \
        [--transformer-engine DIR]      # an unpacked transformer_engine wheel (pure Python part)

Oracles: torch's float8 and e8m0 dtypes, ml_dtypes, torchao's MX and FP4 casts, and Transformer Engine's plain-Python
NVFP4 reference, loaded alone without its native part. Deviations by contract are counted apart and listed; everything
else is a difference and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import cpu_record
import ml_dtypes
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from miles.kernels import formats as f
from miles.kernels.nvfp4_qdq import reference
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.quant.codecs import fp8_block, fp8_tensor, mxfp4, mxfp8

CHUNK = 1 << 20
CONFIGS = {
    "standard": NVFP4QDQConfig(),
    **{
        f"4over6 {e} {mode.value} {'fp16' if fast else 'exact'}": NVFP4QDQConfig(True, e, mode, fast)
        for e in (448, 256)
        for mode in ErrorMode
        for fast in (False, True)
    },
}


def values(count: int, seed: int) -> Iterator[torch.Tensor]:
    """Finite fp32 values in chunks: random bit patterns, normals of random spread, and points near rounding ties."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.cat(
        (f.e2m1_decode(torch.arange(8, dtype=torch.uint8)), f.e4m3_decode(torch.arange(127, dtype=torch.uint8)))
    )
    ties = (grid[1:] + grid[:-1]) / 2
    done = 0
    while done < count:
        n = CHUNK // 4
        bits = (
            torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64)
            .to(torch.int32)
            .view(torch.float32)
        )
        bits = torch.where(torch.isfinite(bits), bits, 1.0)
        normal = torch.randn(2 * n, generator=generator) * torch.exp2(
            torch.randint(-20, 12, (2 * n,), generator=generator).float()
        )
        tie = ties[torch.randint(0, len(ties), (n,), generator=generator)]
        step = torch.randint(-2, 3, (n,), generator=generator, dtype=torch.int32)
        near = (tie.abs().view(torch.int32) + step).clamp_min(0).view(torch.float32)
        chunk = torch.cat((bits, normal, near * torch.where(step > 0, -1.0, 1.0)))
        done += chunk.numel()
        yield chunk[torch.randperm(chunk.numel(), generator=generator)]


def blocks(count: int, seed: int, low: int, high: int, top: float) -> Iterator[torch.Tensor]:
    """fp32 in chunks of 16-element blocks of one magnitude 2^low .. 2^high each; every eighth block's maximum is `top`
    times a power of two or a neighbour of that, where a scale changes."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(-(-count // CHUNK)):
        x = torch.randn((CHUNK // 16, 16), generator=generator).clamp(-4, 4) / 4
        edge = torch.full((CHUNK // 128,), top).view(torch.int32) + torch.randint(
            -1, 2, (CHUNK // 128,), generator=generator, dtype=torch.int32
        )
        x[::8] *= top
        x[::8, 3] = edge.view(torch.float32)
        yield (x * torch.exp2(torch.randint(low, high, (CHUNK // 16, 1), generator=generator).float())).view(-1)


class Counts(dict):
    def add(self, name: str, differing: torch.Tensor | np.ndarray, total: int | None = None) -> None:
        entry = self.setdefault(name, {"compared": 0, "different": 0})
        entry["compared"] += int(
            total if total is not None else differing.size if isinstance(differing, np.ndarray) else differing.numel()
        )
        entry["different"] += int(differing.sum())


def exhaustive(counts: Counts) -> None:
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32

    codes = torch.arange(256, dtype=torch.uint8)
    four = codes[:16]
    counts.add("e2m1 decode, 16 codes, ml_dtypes", f.e2m1_decode(four).numpy().view(np.int32) != four.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32).view(np.int32))  # fmt: skip
    counts.add(
        "e2m1 decode, 16 codes, torchao",
        f.e2m1_decode(four).view(torch.int32) != f4_unpacked_to_f32(four).view(torch.int32),
    )
    for name, ours, dtype, other in (
        ("e4m3", f.e4m3_decode(codes), torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
        ("e8m0", f.e8m0_decode(codes), torch.float8_e8m0fnu, ml_dtypes.float8_e8m0fnu),
    ):
        theirs = codes.view(dtype).float()
        counts.add(f"{name} decode, 256 codes, torch", ~((ours == theirs) | (ours.isnan() & theirs.isnan())))
        theirs = torch.from_numpy(codes.numpy().view(other).astype(np.float32))
        counts.add(f"{name} decode, 256 codes, ml_dtypes", ~((ours == theirs) | (ours.isnan() & theirs.isnan())))


def elements(counts: Counts, x: torch.Tensor) -> None:
    from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked

    clamped = x.clamp(-6, 6)
    mine = f.e2m1_encode(x)
    counts.add("e2m1 encode, ml_dtypes", mine.numpy() != clamped.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8))
    counts.add("e2m1 encode, torchao", mine != f32_to_f4_unpacked(clamped))
    mine = f.e4m3_encode(x)
    clamped = x.clamp(-448, 448)
    counts.add("e4m3 encode, torch", mine != clamped.to(torch.float8_e4m3fn).view(torch.uint8))
    counts.add("e4m3 encode, ml_dtypes", mine.numpy() != clamped.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    mantissa, exponent = np.frexp(np.abs(x.numpy().astype(np.float64)))
    up = np.clip(np.where(mantissa == 0.5, exponent - 1, exponent) + 127, 0, 254)
    counts.add("e8m0 encode up, float64 frexp", f.e8m0_encode(x.abs()).numpy() != np.where(x.numpy() == 0, 0, up))
    fp8(counts, x.clamp(-1e30, 1e30).view(-1, 256))


def fp8(counts: Counts, w: torch.Tensor) -> None:
    """Scales by torch's pooling and numpy's frexp, codes by torch's cast."""
    q, scale = fp8_tensor.quantize(w)
    counts.add("fp8_tensor codes, torch", q != (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    largest = torch.nn.functional.max_pool2d(w.abs()[None], 128)[0]
    fp32 = largest.clamp_min(1e-10) / torch.tensor(448.0)
    mantissa, exponent = np.frexp(fp32.numpy().astype(np.float64))
    up = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent)).astype(np.float32)
    for kind, want in (("fp32", fp32), ("e8m0", torch.from_numpy(up))):
        q, scale = fp8_block.quantize(w, scale=kind)
        counts.add(f"fp8_block {kind} scales, torch", (f.e8m0_decode(scale) if kind == "e8m0" else scale) != want)
        spread = torch.nn.functional.interpolate(want[None, None], scale_factor=128)[0, 0]
        counts.add(
            f"fp8_block {kind} codes, torch",
            q != (w / spread).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8),
        )


def mx(counts: Counts, deviations: Counts, name: str, x: torch.Tensor) -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    codec, dtype, top = {"mxfp8": (mxfp8, torch.float8_e4m3fn, 448.0), "mxfp4": (mxfp4, torch.float4_e2m1fn_x2, 6.0)}[
        name
    ]
    rows = x.view(-1, 1024)
    scale, data = to_mx(rows, dtype, 32, ScaleCalculationMode.RCEIL)
    mine, mine_scale = codec.quantize(rows)
    theirs_scale = scale.view(torch.uint8).view(mine_scale.shape)
    theirs = data.view(torch.uint8).view(mine.shape)
    amax = rows.view(-1, 32).abs().amax(-1).view(mine_scale.shape)
    product, quotient = f.e8m0_encode(amax * codec.RECIPROCAL), f.e8m0_encode(amax / top)
    association = product != quotient
    code_zero = ((mine_scale == 0) | (theirs_scale == 0)) & ~association
    log2 = ~association & ~code_zero & (quotient != theirs_scale)
    contract = association | code_zero | log2
    deviations.add(
        f"{name}: amax * fp32(1/{top:g}) and amax / {top:g} round to different powers of two (blocks)", association
    )
    deviations.add(f"{name}: scale code 0, where torchao multiplies by 1 and we by 2^127 (blocks)", code_zero)
    deviations.add(f"{name}: torchao's ceil(log2) is off for its own quotient (blocks)", log2)
    counts.add(f"{name} scales, torchao RCEIL", (mine_scale != theirs_scale) & ~contract)
    per_block = (mine != theirs).view(*mine_scale.shape, -1)
    counts.add(f"{name} codes, torchao RCEIL", per_block & ~contract.unsqueeze(-1))


class Anything:
    """Answers every attribute, so that class-level defaults of the loaded module can be evaluated."""

    def __getattr__(self, name: str) -> Anything:
        return Anything()

    def __or__(self, other: object) -> Anything:
        return self

    __ror__ = __or__

    def __call__(self, *args: object) -> Anything:
        return self


def load_transformer_engine(directory: Path):
    """Its NVFP4 reference module alone: three imports that it does not need for quantising are stand-ins."""
    path = directory / "transformer_engine/pytorch/custom_recipes/reference_nvfp4.py"
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.custom_recipes"):
        sys.modules[name] = types.ModuleType(name)
    recipes = sys.modules["transformer_engine.pytorch.custom_recipes"]
    for name in ("gemm", "reference_utils"):
        setattr(recipes, name, Anything())
    base = types.ModuleType("transformer_engine.pytorch.quantized_tensor")
    base.QuantizedTensorStorage, base.Quantizer = type("QuantizedTensorStorage", (), {}), type("Quantizer", (), {})
    sys.modules[base.__name__] = base
    spec = importlib.util.spec_from_file_location("reference_nvfp4", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_nvfp4"] = module
    spec.loader.exec_module(module)
    return module.NVFP4QuantizerRef


def transformer_engine(
    counts: Counts, deviations: Counts, quantizer, x: torch.Tensor, name: str, config: NVFP4QDQConfig
) -> None:
    w = x.view(-1, 2048).to(torch.bfloat16)
    w[0, :64] = torch.tensor([0.0, -0.0]).repeat(32)
    amax = reference.tensor_amax(w)
    codes, scale = quantizer._quantize_blockwise_reference(
        w, amax.view(1), 16, 1, pow_2_scales=False, nvfp4_use_4over6=config.use_4over6, nvfp4_e4m3_max=config.e4m3_max,
        nvfp4_4over6_err_mode=config.error_mode.value, nvfp4_4over6_err_use_fast_math=config.error_use_fast_math, eps=0.0,
    )  # fmt: skip
    mine = reference.quantize_blocks(w, amax, config)
    theirs = f.unpack_e2m1(codes).view(mine.codes.shape)
    zero = (mine.codes == 8) & (theirs == 0) & (w.view(mine.codes.shape) == 0)
    deviations.add("nvfp4: code of -0.0 is 8 (kept sign), Transformer Engine's plain reference gives 0", zero)
    counts.add(f"nvfp4 {name} codes, Transformer Engine", (mine.codes != theirs) & ~zero)
    counts.add(
        f"nvfp4 {name} block scales, Transformer Engine", mine.scale8 != scale.view(torch.uint8).view(mine.scale8.shape)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=12_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transformer-engine", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    counts, deviations = Counts(), Counts()
    exhaustive(counts)
    for x in values(args.values, args.seed):
        elements(counts, x)
    for name, top in (("mxfp8", 448.0), ("mxfp4", 6.0)):
        for x in blocks(args.values, args.seed + 1, -110, 110, top):
            mx(counts, deviations, name, x)
    if args.transformer_engine:
        quantizer = load_transformer_engine(args.transformer_engine)
        for x in blocks(args.values, args.seed + 2, -24, 1, 6.0):
            for name, config in CONFIGS.items():
                transformer_engine(counts, deviations, quantizer, x, name, config)
    different = sum(c["different"] for c in counts.values())
    record = {
        **cpu_record.head(),
        "versions": {"torch": torch.__version__, "ml_dtypes": ml_dtypes.__version__},
        "values": args.values,
        "different": different,
        "comparisons": counts,
        "deviations by contract": deviations,
    }
    print(json.dumps(record, indent=1))
    if args.out:
        cpu_record.write(args.out, record)
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()

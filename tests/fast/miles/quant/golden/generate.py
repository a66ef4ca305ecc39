"""Golden files of the codecs. Run from the repository: `python tests/fast/miles/quant/golden/generate.py`.

Origin of truth: numpy float32 and ml_dtypes casts (`numpy_nvfp4.py` for NVFP4), never the code under test. Rows that
tell each mutant from the real order of operations are searched for and kept, so that `order_of_operations_mutants`
can fail. A changed file needs a decision record.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).resolve().parent
SEED = 20260
F = np.float32
MAXIMA = (12.0, 0.875, 3.0, 1.1484375, 2.0**-20 * 5, 1.46875)


def load_numpy_nvfp4():
    spec = importlib.util.spec_from_file_location("numpy_nvfp4", HERE.parent / "numpy_nvfp4.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["numpy_nvfp4"] = module
    spec.loader.exec_module(module)
    return module


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(F)


def candidates(rng: np.random.Generator, amax: float, n: int) -> np.ndarray:
    """Rows of 16 within +-amax: random of many magnitudes, and rows on the E2M1 grid and its ties."""
    x = rng.standard_normal((n, 16)).astype(F)
    x = x / np.abs(x).max(axis=1, keepdims=True) * F(amax) * np.exp2(-rng.integers(0, 12, (n, 1))).astype(F)
    grid = rng.choice([0, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6], (n, 16)) * rng.choice([1, -1], (n, 16))
    grid = (grid * amax / 6 * np.exp2(-rng.integers(0, 8, (n, 1)))).astype(F)
    x = np.where(rng.random((n, 1)) < 0.4, grid, x * rng.uniform(0.5, 1, (n, 1)).astype(F))
    x = np.clip(bf16(x), F(-amax), F(amax))
    # Short mantissas meet the scale's rounding ties exactly: there the last bit of an association decides.
    short = (rng.integers(1, 32, n) * np.exp2(np.floor(np.log2(amax / 32)) - rng.integers(0, 8, n))).astype(F)
    largest = np.abs(x).argmax(axis=1)
    short = np.where(rng.random(n) < 0.3, F(amax) * np.exp2(-rng.integers(0, 8, n)).astype(F), short).astype(F)
    take = rng.random(n) < 0.5
    x[take] = np.clip(x[take], -short[take, None], short[take, None])
    x[np.flatnonzero(take), largest[take]] = short[take]
    return x


def edge_rows(amax: float) -> np.ndarray:
    ramp = (np.arange(16) - 8).astype(F) * F(amax / 48)
    zeros = np.zeros(16, dtype=F)
    signed = np.where(np.arange(16) % 2 == 0, F(0), F(-0.0)).astype(F)
    tiny = np.where(np.arange(16) % 3 == 0, F(amax) * F(2.0**-30), F(0)).astype(F)
    return bf16(np.stack([np.full(16, F(amax)), ramp, ramp / 512, zeros, signed, tiny, -tiny]))


def witnesses(module, rng: np.random.Generator, amax: float, options: dict, steps: dict) -> np.ndarray:
    """Up to three rows whose result the mutant changes, out of a few random pools."""
    for _ in range(8):
        pool = candidates(rng, amax, 20000)
        pool[0] = amax
        right, wrong = module.NVFP4(**options)(pool, amax), module.NVFP4(**options, steps=steps)(pool, amax)
        differs = (right["codes"] != wrong["codes"]).any(1) | (right["scale"] != wrong["scale"])
        differs |= (right["y"].view(np.int32) != wrong["y"].view(np.int32)).any(1)
        if differs.any():
            return pool[np.flatnonzero(differs)[:3]]
    return pool[:0]


def nvfp4(rng: np.random.Generator) -> dict[str, np.ndarray]:
    module = load_numpy_nvfp4()
    out: dict[str, np.ndarray] = {}
    told: dict[str, int] = {}
    for i, amax in enumerate(MAXIMA):
        rows = [edge_rows(amax), candidates(rng, amax, 12)]
        for name, (options, steps) in module.MUTANTS.items():
            found = witnesses(module, rng, amax, options, steps)
            told.setdefault(name, 0)
            told[name] += len(found)
            rows.append(found)
        x = np.concatenate(rows)
        out[f"{i}/x"] = x.astype(ml_dtypes.bfloat16)
        for e, mse, fp16 in [
            (None, None, None),
            *[(e, m, h) for e in (448, 256) for m in (False, True) for h in (False, True)],
        ]:
            kind = module.NVFP4() if e is None else module.NVFP4(True, e, mse, fp16)
            name = "standard" if e is None else f"4over6-{e}-{'MSE' if mse else 'MAE'}-{'fp16' if fp16 else 'exact'}"
            for key, value in kind(x, amax).items():
                out[f"{i}/{name}/{key}"] = np.ascontiguousarray(value)
    if silent := [name for name, count in told.items() if count == 0]:
        raise SystemExit(f"no row tells these mutants from the real order: {silent}")
    return out


def e8m0_up(v: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(v.astype(np.float64))
    return np.where(v == 0, 0, np.clip(np.where(mantissa == 0.5, exponent - 1, exponent) + 127, 0, 254)).astype(
        np.uint8
    )


def mx(rng: np.random.Generator, top: float, dtype: type) -> dict[str, np.ndarray]:
    x = rng.standard_normal((24, 4, 32)).astype(F) * np.exp2(rng.integers(-120, 120, (24, 4, 1))).astype(F)
    x[0, 0], x[0, 1, ::2], x[1, 0, 5] = 0, -0.0, F(top)
    x[1, 1], x[1, 2] = F(2.0**-140), np.where(np.arange(32) == 3, F(top * 2.0**100), F(0))
    x = bf16(x)
    code = e8m0_up(np.abs(x).max(-1) * (F(1) / F(top)))
    with np.errstate(under="ignore"):
        q = np.clip(x * np.exp2(127.0 - code.astype(np.float64)).astype(F)[..., None], F(-top), F(top)).astype(dtype)
        y = q.astype(F) * np.exp2(code.astype(np.float64) - 127).astype(F)[..., None]
    return {
        "x": x.reshape(24, 128).astype(ml_dtypes.bfloat16),
        "codes": q.view(np.uint8).reshape(24, 128),
        "scale": code,
        "y": y.reshape(24, 128),
    }


def fp8(rng: np.random.Generator) -> dict[str, np.ndarray]:
    x = bf16(rng.standard_normal((131, 144)).astype(F) * np.exp2(rng.integers(-12, 6, (131, 144))).astype(F))
    x[128:, 128:] = 0
    out = {"x": x.astype(ml_dtypes.bfloat16)}
    s = np.maximum(np.abs(x).max(), F(1e-12)) / F(448)
    out |= {
        "tensor/scale": s.reshape(1),
        "tensor/codes": np.clip(x / s, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
    }
    for kind in ("fp32", "e8m0"):
        scale, codes = np.zeros((2, 2), dtype=F), np.zeros(x.shape, dtype=np.uint8)
        for r, c in np.ndindex(2, 2):
            part = np.s_[r * 128 : (r + 1) * 128, c * 128 : (c + 1) * 128]
            tile = np.maximum(np.abs(x[part]).max(), F(1e-10)) / F(448)
            if kind == "e8m0":
                tile = F(2.0 ** (int(e8m0_up(np.asarray(tile))) - 127))
            scale[r, c] = tile
            codes[part] = np.clip(x[part] / tile, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        out |= {f"block-{kind}/scale": scale, f"block-{kind}/codes": codes}
    return out


def main() -> None:
    rng = np.random.default_rng(SEED)
    files = {
        "nvfp4": nvfp4(rng),
        "mxfp8": mx(rng, 448.0, ml_dtypes.float8_e4m3fn),
        "mxfp4": mx(rng, 6.0, ml_dtypes.float4_e2m1fn),
        "fp8": fp8(rng),
    }
    for name, tensors in files.items():
        metadata = {
            "generator": "tests/fast/miles/quant/golden/generate.py",
            "seed": str(SEED),
            "origin": "numpy float32 with ml_dtypes casts",
            "versions": json.dumps({"numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__}),
            "maxima": json.dumps(MAXIMA) if name == "nvfp4" else "",
        }
        save_file(tensors, HERE / f"{name}.safetensors", metadata=metadata)


if __name__ == "__main__":
    main()

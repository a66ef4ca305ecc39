"""A second implementation of NVFP4, in numpy float32, with each step replaceable: origin of the golden files, and the
ground on which the mutants stand. It shares no code with `miles`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

F = np.float32
MAX = np.finfo(F).max
SIXTH = F(1) / F(6)


def e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, F(-448), F(448)).astype(ml_dtypes.float8_e4m3fn)


def e2m1(x: np.ndarray) -> np.ndarray:
    return np.clip(x, F(-6), F(6)).astype(ml_dtypes.float4_e2m1fn)


def sum_left_to_right(terms: np.ndarray) -> np.ndarray:
    total = terms[:, 0]
    for i in range(1, 16):
        total = total + terms[:, i]
    return total


def sum_squares(d: np.ndarray) -> np.ndarray:
    return sum_left_to_right(d * d)


STEPS: dict[str, Callable] = {
    "s_dec": lambda s_enc, amax, e: F(1) / s_enc,
    "scale": lambda a, s_enc: a * (s_enc * SIXTH),
    "inverse": lambda scale, s_dec, s_enc: np.minimum(F(1) / (scale * s_dec), MAX),
    "scaled": lambda x, inverse, scale, s_dec: x * inverse[:, None],
    "decode": lambda q, scale, amax, s_dec, e: q * ((scale * amax) * (F(1) / F(6 * e)))[:, None],
    "s6": lambda a, s_enc: (a / F(6)) * s_enc,
    "s4": lambda s6, a, s_enc: s6 * F(1.5),
    "exact": lambda q, scale, amax, e: ((q * scale[:, None]) * amax) / F(6 * e),
    "half": lambda x, s_enc: x * s_enc,
    "sum": sum_left_to_right,
    "squares": sum_squares,
    "choose": lambda error4, error6: error4 < error6,
}


@dataclass
class NVFP4:
    """One rounding of fp32 blocks [n, 16] with tensor maximum `amax`; `steps` overrides entries of STEPS."""

    four_over_six: bool = False
    e: int = 448
    mse: bool = False
    fp16: bool = False
    steps: dict[str, Callable] = field(default_factory=dict)

    def step(self, name: str) -> Callable:
        return self.steps.get(name, STEPS[name])

    def candidate(self, x: np.ndarray, scale8: np.ndarray, s_enc: F, s_dec: F) -> np.ndarray:
        scale = scale8.astype(F)
        inverse = self.step("inverse")(scale, s_dec, s_enc)
        return e2m1(self.step("scaled")(x, inverse, scale, s_dec))

    def error(self, x: np.ndarray, q: np.ndarray, scale8: np.ndarray, amax: F, s_enc: F) -> np.ndarray:
        scale, q = scale8.astype(F), q.astype(F)
        if self.fp16:
            d = (q * scale[:, None]).astype(np.float16).astype(F) - self.step("half")(x, s_enc)
        else:
            d = self.step("exact")(q, scale, amax, self.e) - x
        return self.step("squares")(d) if self.mse else self.step("sum")(np.abs(d))

    def __call__(self, x: np.ndarray, amax: float) -> dict[str, np.ndarray]:
        with np.errstate(all="ignore"):
            amax = F(amax)
            s_enc = np.minimum(F(self.e * 6) / amax, MAX) if amax else F(1)
            s_dec = self.step("s_dec")(s_enc, amax, self.e)
            a = np.abs(x).max(axis=1)
            if self.four_over_six:
                s6 = self.step("s6")(a, s_enc)
                scale6, scale4 = e4m3(s6), e4m3(self.step("s4")(s6, a, s_enc))
                q6, q4 = (self.candidate(x, s, s_enc, s_dec) for s in (scale6, scale4))
                error6, error4 = (self.error(x, q, s, amax, s_enc) for q, s in ((q6, scale6), (q4, scale4)))
                four = self.step("choose")(error4, error6)
                q, scale8 = np.where(four[:, None], q4, q6), np.where(four, scale4, scale6)
            else:
                scale8 = np.where(a == 0, F(0), self.step("scale")(a, s_enc))
                scale8 = e4m3(scale8)
                q = self.candidate(x, scale8, s_enc, s_dec)
            y = self.step("decode")(q.astype(F), scale8.astype(F), amax, s_dec, self.e)
            y = np.where(q.astype(F) == 0, np.copysign(F(0), x), y)
        return {"codes": q.view(np.uint8), "scale": scale8.view(np.uint8), "s_dec": s_dec.reshape(1), "y": y.astype(F)}


def tree(terms: np.ndarray) -> np.ndarray:
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    return terms[:, 0]


def fused_squares(d: np.ndarray) -> np.ndarray:
    total = np.zeros(len(d), dtype=F)
    for i in range(16):
        total = (d[:, i].astype(np.float64) ** 2 + total).astype(F)
    return total


# name -> (which configuration, replaced steps): every association that the specification lists.
MUTANTS: dict[str, tuple[dict, dict[str, Callable]]] = {
    "scale: (a * S_enc) / 6 by reciprocal last": ({}, {"scale": lambda a, s: (a * s) * SIXTH}),
    "scale: (a / 6) * S_enc, the 4over6 association": ({}, {"scale": lambda a, s: (a / F(6)) * s}),
    "scale: a * (S_enc / 6) by division": ({}, {"scale": lambda a, s: a * (s / F(6))}),
    "S_dec: A / (6 E)": ({}, {"s_dec": lambda s, amax, e: amax / F(6 * e)}),
    "inverse: S_enc / scale8": ({}, {"inverse": lambda scale, s_dec, s_enc: np.minimum(s_enc / scale, MAX)}),
    "code: x / (scale8 * S_dec)": ({}, {"scaled": lambda x, inv, scale, s_dec: x / (scale * s_dec)[:, None]}),
    "decode: q * (scale8 * (A / (6 E)))": ({}, {"decode": lambda q, s, amax, d, e: q * (s * (amax * (F(1) / F(6 * e))))[:, None]}),
    "decode: division by 6 E": ({}, {"decode": lambda q, s, amax, d, e: q * ((s * amax) / F(6 * e))[:, None]}),
    "decode: stored instead of te": ({}, {"decode": lambda q, s, amax, d, e: q * (s * d)[:, None]}),
    "4over6: a * (S_enc * f), the standard association": ({"four_over_six": True}, {"s6": lambda a, s: a * (s * SIXTH)}),
    "4over6: s4 = (a / 4) * S_enc": ({"four_over_six": True}, {"s4": lambda s6, a, s: (a / F(4)) * s}),
    "4over6 exact: q * ((scale8 * A) / (6 E))": (
        {"four_over_six": True}, {"exact": lambda q, s, amax, e: q * ((s * amax) / F(6 * e))[:, None]}),
    "4over6 exact: reciprocal of 6 E": (
        {"four_over_six": True}, {"exact": lambda q, s, amax, e: ((q * s[:, None]) * amax) * (F(1) / F(6 * e))}),
    "4over6: tree sum": ({"four_over_six": True}, {"sum": tree}),
    "4over6: fused multiply-add in the square sum": ({"four_over_six": True, "mse": True}, {"squares": fused_squares}),
    "4over6 fp16: x * S_enc rounded to fp16": (
        {"four_over_six": True, "fp16": True}, {"half": lambda x, s: (x * s).astype(np.float16).astype(F)}),
    "4over6: ties go to 4": ({"four_over_six": True}, {"choose": lambda e4, e6: e4 <= e6}),
}  # fmt: skip

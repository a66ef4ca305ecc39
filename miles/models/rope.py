"""Rotary position embedding as the checkpoint states it: which formula, which base, which pair order.

Nothing is defaulted that the Hugging Face (HF) config may state: a rope family without a base, an unknown
type or a recipe that contradicts the checkpoint is an error with both values. Leaves out multimodal
sections and dynamic (length-dependent) scaling: both are refused by name.

Formulas: plain inv_i = base^(-2i/d); linear: plain / factor; YaRN (arXiv 2309.00071) and the Llama 3.1
frequency split as published with those models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.models.errors import ModelError, UnsupportedModelError
from miles.models.spellings import rope_section

if TYPE_CHECKING:
    import torch

_KIND_OF_HF = {"default": "plain", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}
# Numbers that each kind reads; a setting outside them would change the angles unseen.
_SCALINGS = {
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
}
_KNOWN = frozenset(
    {"rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "truncate"}
).union(*_SCALINGS.values())


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding; `dim` is the number of rotated channels of a head.

    `interleaved`: pairs are (0,1), (2,3), ... instead of (i, i + dim/2).
    `original_length` is the trained context L of YaRN and Llama 3 scaling.
    """

    kind: str
    theta: float
    dim: int
    interleaved: bool = False
    factor: float = 1.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], *, head_dim: int, expected_kind: str | None = None) -> RopeSpec:
        """Read the rotary settings in any of transformers' spellings (see `spellings.rope_section`).

        `expected_kind` is the recipe's `rope.type`; it must agree with the checkpoint.
        """
        section = rope_section(hf)
        name = section.get("rope_type", "default")
        if not isinstance(name, str) or name not in _KIND_OF_HF:
            raise UnsupportedModelError(
                f"config.json: rope type {name!r} is not supported; supported: {', '.join(sorted(_KIND_OF_HF))}"
            )
        kind = _KIND_OF_HF[name]
        if expected_kind is not None and expected_kind != kind:
            raise ModelError(
                f"rope.type: the recipe says {expected_kind!r} but the checkpoint says {kind!r} (rope type {name!r}); "
                "set rope.type to the checkpoint's value or choose another checkpoint"
            )
        if unknown := sorted(section.keys() - _KNOWN):
            raise UnsupportedModelError(
                f"config.json: rotary setting {unknown[0]!r} is not computed here; known: {', '.join(sorted(_KNOWN))}"
            )
        if section.get("truncate", True) is not True:
            raise UnsupportedModelError("config.json: rotary setting truncate false is not computed here, only true")
        if "rope_theta" not in section:
            raise ModelError("config.json: rope_theta is missing; it must stand at top level or inside rope_parameters")
        fraction = _number(section, "partial_rotary_factor") if "partial_rotary_factor" in section else 1.0
        return cls(
            kind=kind,
            theta=_number(section, "rope_theta"),
            dim=int(head_dim * fraction),
            interleaved=bool(hf.get("rope_interleave", False)),
            **_scaling(kind, hf, section),
        )

    def inv_freq(self) -> torch.Tensor:
        """Inverse frequencies, float32 `[dim/2]`, in the float32 operation order of the HF modules."""
        import torch

        exponents = torch.arange(0, self.dim, 2, dtype=torch.int64).to(torch.float32) / self.dim
        base = self.theta**exponents
        plain = 1.0 / base
        if self.kind == "plain":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            return self._llama3(plain)
        low, high = self.yarn_range()
        span = float(high - low) if high > low else 0.001
        ramp = torch.clamp((torch.arange(self.dim // 2, dtype=torch.float32) - low) / span, 0, 1)
        keep = 1 - ramp
        return 1.0 / (self.factor * base) * (1 - keep) + plain * keep

    def yarn_range(self) -> tuple[int, int]:
        """Channel pairs (low, high) between which YaRN moves from kept to interpolated frequencies."""

        def pair_of(turns: float) -> float:
            return self.dim * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(self.theta))

        return max(math.floor(pair_of(self.beta_fast)), 0), min(math.ceil(pair_of(self.beta_slow)), self.dim - 1)

    def cos_sin_scale(self) -> float:
        """Factor on cos and sin: m(mscale)/m(mscale_all_dim) for YaRN, else 1."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)

    def softmax_scale(self, qk_dim: int, *, mla: bool = False) -> float:
        """Scale of q.k: d^-0.5, times m(mscale_all_dim)^2 for multi-head latent attention under YaRN."""
        scale = qk_dim**-0.5
        if mla and self.kind == "yarn" and self.mscale_all_dim:
            scale *= yarn_mscale(self.factor, self.mscale_all_dim) ** 2
        return scale

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        import torch

        wavelength = 2 * math.pi / plain
        smooth = (self.original_length / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - smooth) * plain / self.factor + smooth * plain
        long = wavelength > self.original_length / self.low_freq_factor
        short = wavelength < self.original_length / self.high_freq_factor
        return torch.where(short, plain, torch.where(long, plain / self.factor, blended))


def yarn_mscale(factor: float, scale: float) -> float:
    """m(s) = 0.1 s ln(factor) + 1 for factor > 1, else 1."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _number(section: Mapping[str, Any], name: str) -> float:
    value = section[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"config.json: {name} must be a number, got {value!r}")
    return float(value)


def _scaling(kind: str, hf: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    if kind == "plain":
        return {}
    if "factor" not in section:
        raise ModelError(f"config.json: rope type {kind!r} needs 'factor'")
    values: dict[str, Any] = {"factor": _number(section, "factor")}
    if kind == "linear":
        return values
    original = section.get("original_max_position_embeddings")
    if original is None and kind == "yarn":
        original = hf.get("max_position_embeddings")
    if type(original) is not int or original < 1:
        raise ModelError(f"config.json: rope type {kind!r} needs 'original_max_position_embeddings', got {original!r}")
    values["original_length"] = original
    if kind == "llama3":
        for name in _SCALINGS[kind]:
            if name not in section:
                raise ModelError(f"config.json: rope type 'llama3' needs {name!r}")
    values.update({name: _number(section, name) for name in _SCALINGS[kind] if name in section})
    return values

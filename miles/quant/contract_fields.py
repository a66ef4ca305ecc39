"""What a quantisation contract says, and how two are compared. `miles.quant.contract` reads and writes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from miles.config import StrictModel
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.quant.errors import ContractMismatch, QuantConfigError

Format = Literal["nvfp4", "mxfp4", "mxfp8", "fp8_block", "fp8_tensor", "mixed_fp8"]


class FourOverSix(StrictModel):
    on: bool = False
    e4m3_max: int = 448
    error_mode: Literal["MAE", "MSE"] = "MAE"
    domain: Literal["exact", "fp16"] = "exact"


class QuantContract(StrictModel):
    """Fields of the contract. `scope_digest` is the digest of the sorted names of the quantised tensors."""

    schema_version: Literal[1] = 1
    # stored: the tensors are in this format; masters: they are unquantised, trained with this rounding.
    weights: Literal["stored", "masters"] = "stored"
    format: Format
    block: tuple[int, int]
    scale_dtype: Literal["e4m3", "e8m0", "fp32"]
    decode: Literal["te", "stored", "exact"]
    four_over_six: FourOverSix = FourOverSix()
    tensors: tuple[str, ...]
    scope_digest: str
    gate_up_shared: bool
    ignore: tuple[str, ...] = ()
    source_digest: str
    producer: dict[str, str]
    lossless: bool
    exceptions: dict[str, str] = Field(default_factory=dict)

    def digest(self) -> str:
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def canonical(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1)

    def nvfp4(self) -> NVFP4QDQConfig:
        """The rounding this checkpoint was made with; QuantConfigError when it is not NVFP4."""
        if self.format != "nvfp4":
            raise QuantConfigError(f"the contract's format is {self.format}, not nvfp4")
        f = self.four_over_six
        return NVFP4QDQConfig(
            use_4over6=f.on,
            e4m3_max=f.e4m3_max,
            error_mode=ErrorMode(f.error_mode),
            error_use_fast_math=f.domain == "fp16",
            decode="stored" if self.decode == "stored" else "te",
        )


def scope_digest(names: Iterable[str]) -> str:
    # Names that are no text are refused where they are read, not here.
    return hashlib.sha256("\n".join(sorted(names)).encode(errors="surrogatepass")).hexdigest()


def four_over_six(config: NVFP4QDQConfig) -> FourOverSix:
    return FourOverSix(
        on=config.use_4over6,
        e4m3_max=config.e4m3_max,
        error_mode=config.error_mode.value,
        domain="fp16" if config.error_use_fast_math else "exact",
    )


def nvfp4_contract(
    config: NVFP4QDQConfig,
    tensors: Sequence[str],
    *,
    source_digest: str,
    producer: dict[str, str],
    ignore: Sequence[str] = (),
    weights: Literal["stored", "masters"] = "stored",
) -> QuantContract:
    """Contract of an NVFP4 checkpoint, or of a trainer that fake-quantises `tensors` (Hugging Face names)."""
    return QuantContract(
        weights=weights,
        format="nvfp4",
        block=(1, 16),
        scale_dtype="e4m3",
        decode=config.decode,
        four_over_six=four_over_six(config),
        tensors=tuple(sorted(tensors)),
        scope_digest=scope_digest(tensors),
        gate_up_shared=True,
        ignore=tuple(ignore),
        source_digest=source_digest,
        producer=producer,
        lossless=False,
    )


COMPARED = (
    "format",
    "block",
    "scale_dtype",
    "decode",
    "four_over_six",
    "scope_digest",
    "gate_up_shared",
    "ignore",
    "exceptions",
)


def require_equal(expected: QuantContract, found: QuantContract, *, where: str) -> None:
    """Raises `ContractMismatch` naming each differing field and both values. Producer and source may differ."""
    differences = []
    for name in COMPARED:
        a, b = getattr(expected, name), getattr(found, name)
        if isinstance(a, FourOverSix):
            differences += [
                f"four_over_six.{f}: expected {getattr(a, f)!r}, found {getattr(b, f)!r}"
                for f in FourOverSix.model_fields
                if getattr(a, f) != getattr(b, f)
            ]
        elif a != b:
            differences.append(f"{name}: expected {a!r}, found {b!r}" + _names_that_differ(expected, found, name))
    if differences:
        raise ContractMismatch(f"{where}: quantisation contracts differ in " + "; ".join(differences))


def _names_that_differ(expected: QuantContract, found: QuantContract, field: str) -> str:
    if field != "scope_digest":
        return ""
    only = sorted(set(expected.tensors) ^ set(found.tensors))[:3]
    return f" (for example {', '.join(only)})" if only else ""

"""The quantisation contract: what exactly was done to a checkpoint, written beside it and compared wherever it is used.

`quantization_contract.json` is written last but one (before `COMPLETE`), its digest is repeated in the model's
`config.json` and in every shard's metadata. QAT start, export and engine launch call `require_equal`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from miles.config import StrictModel
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.quant.errors import ContractMismatch, QuantConfigError
from miles.quant.scope import is_shared_expert

FILE = "quantization_contract.json"
DIGEST_KEY = "quantization_contract_digest"
SCHEMA = 1
Format = Literal["nvfp4", "mxfp4", "mxfp8", "fp8_block", "fp8_tensor", "mixed_fp8"]


class FourOverSix(StrictModel):
    on: bool = False
    e4m3_max: int = 448
    error_mode: Literal["MAE", "MSE"] = "MAE"
    domain: Literal["exact", "fp16"] = "exact"


class QuantContract(StrictModel):
    """Fields of the contract. `scope_digest` is the digest of the sorted names of the quantised tensors."""

    schema_version: Literal[1] = 1
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
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


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
) -> QuantContract:
    """Contract of an NVFP4 checkpoint, or of a trainer that fake-quantises `tensors` (Hugging Face names)."""
    return QuantContract(
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


COMPARED = ("format", "block", "scale_dtype", "decode", "four_over_six", "scope_digest", "gate_up_shared", "ignore")


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


def check_rounding(directory: Path, rounding: NVFP4QDQConfig, *, where: str) -> QuantContract | None:
    """At the start of fake QAT or of an engine: a checkpoint that has a contract must have this rounding.

    Returns the contract, or None for a plain checkpoint. Raises `ContractMismatch` naming field and both values.
    """
    directory = Path(directory)
    if not (directory / FILE).exists():
        refuse_quantised_shared_experts(_tensor_names(directory), where=str(directory))
        return None
    found = read(directory)
    expected = found.model_copy(
        update={
            "format": "nvfp4",
            "decode": rounding.decode,
            "four_over_six": four_over_six(rounding),
            "block": (1, 16),
        }
    )
    require_equal(expected, found, where=where)
    return found


def refuse_quantised_shared_experts(names: Iterable[str], *, where: str) -> None:
    """Raises when a shared expert of a checkpoint is quantised: no trainer of ours rounds it, so outputs would differ."""
    bad = [
        n
        for n in names
        if n.endswith((".weight_scale", ".weight_scale_inv", ".weight_scale_2")) and is_shared_expert(n)
    ]
    if bad:
        raise QuantConfigError(
            f"{where}: shared experts are quantised ({', '.join(sorted(bad)[:3])}); make the checkpoint again with `miles convert requantise`"
        )


def write(directory: Path, contract: QuantContract) -> str:
    """Write `quantization_contract.json` atomically; returns its digest."""
    target = directory / FILE
    temporary = target.with_name(f".{FILE}.tmp")
    with open(temporary, "w") as f:
        f.write(contract.canonical() + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, target)
    return contract.digest()


def read(directory: Path, *, legacy: Mapping[str, Any] | None = None) -> QuantContract:
    """The contract of a checkpoint, checked against the digest that `config.json` repeats.

    Without a contract: an error, or with `legacy` (explicit fields: format, decode, four_over_six, tensors, ...) the
    contract that the caller answers for. Quantised shared experts are refused either way.
    """
    directory = Path(directory)
    path = directory / FILE
    config = directory / "config.json"
    quantization = json.loads(config.read_text()).get("quantization_config", {}) if config.exists() else {}
    refuse_quantised_shared_experts(_tensor_names(directory), where=str(directory))
    if not path.exists():
        if legacy is None:
            raise QuantConfigError(
                f"{directory} has no {FILE}: it was not made by `miles convert`. Make one with `miles convert requantise`, "
                "or state the fields with `--accept-legacy FIELDS.json`"
            )
        return _legacy(legacy)
    contract = QuantContract.model_validate_json(path.read_text())
    repeated = quantization.get(DIGEST_KEY)
    if repeated is not None and repeated != contract.digest():
        raise ContractMismatch(f"{config}: {DIGEST_KEY} is {repeated}, {FILE} has {contract.digest()}")
    return contract


def _legacy(fields: Mapping[str, Any]) -> QuantContract:
    needed = ("format", "block", "scale_dtype", "decode", "four_over_six", "tensors", "gate_up_shared")
    missing = [f for f in needed if f not in fields]
    if missing:
        raise QuantConfigError(f"--accept-legacy needs every field stated, missing: {', '.join(missing)}")
    filled = {
        "scope_digest": scope_digest(fields["tensors"]),
        "source_digest": "legacy",
        "producer": {"conversion": "legacy"},
        "lossless": False,
        **fields,
    }
    return QuantContract.model_validate_json(json.dumps(filled))


def _tensor_names(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return list(json.loads(index.read_text())["weight_map"])
    names: list[str] = []
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        names += [n for n in header if n != "__metadata__"]
    return names

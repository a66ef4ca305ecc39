"""The quantisation contract: what exactly was done to a checkpoint, written beside it and compared wherever it is used.

`quantization_contract.json` is written last but one (before `COMPLETE`), its digest is repeated in the model's
`config.json` and in every shard's metadata (of unquantised weights: in the file itself). QAT start, export and engine
launch call `require_equal`.

A model that was trained with fake quantisation and is saved unquantised has a contract too (`weights: masters`): it
says how its experts must be rounded, so that a later conversion, engine or training cannot round them otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles.config.files import write_atomic
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.contract_fields import (
    COMPARED,
    FourOverSix,
    QuantContract,
    four_over_six,
    nvfp4_contract,
    require_equal,
    scope_digest,
)
from miles.quant.errors import ContractMismatch, ConversionError, QuantConfigError
from miles.quant.headers import Header, quantised_weights, quantization_of, read_headers, read_json
from miles.quant.scope import Scope, is_shared_expert

FILE = "quantization_contract.json"
DIGEST_KEY = "quantization_contract_digest"
MAKE_ONE = "Make one with `miles convert requantise`, or state its fields with `miles convert check --accept-legacy FIELDS.json`"

__all__ = [
    "COMPARED",
    "DIGEST_KEY",
    "FILE",
    "FourOverSix",
    "QuantContract",
    "check_rounding",
    "four_over_six",
    "nvfp4_contract",
    "parse",
    "read",
    "read_file",
    "require_equal",
    "require_resumed",
    "scope_digest",
    "write",
]


def require_resumed(mine: QuantContract | None, saved: Mapping[str, Any] | None, *, where: Path | str) -> None:
    """A training checkpoint goes on with the rounding it was trained with. `saved`: the contract in its manifest."""
    if saved is not None and mine is not None:
        return require_equal(parse(json.dumps(saved), where=where), mine, where=f"resume from {where}")
    if saved is not None or mine is not None:
        before, now = ("with", "without") if saved is not None else ("without", "with")
        raise ContractMismatch(
            f"{where} was trained {before} fake quantisation, this run is {now}; resume with the quant section it was "
            "started with, or start a new run from its exported model"
        )


def check_rounding(
    directory: Path, rounding: NVFP4QDQConfig | None, *, where: str, scope: Scope | None = None
) -> QuantContract | None:
    """At the start of a trainer or an engine: a checkpoint that has a contract must have this rounding and scope.

    `rounding` None: nothing is rounded. Returns the contract, or None for a plain checkpoint. Raises `ContractMismatch`
    naming field and both values, and QuantConfigError for weights that are packed already: trainer and engine read
    unquantised ones.
    """
    directory, scope = Path(directory), scope or Scope()
    if not (directory / FILE).exists():
        if rounding is not None:
            _refuse_quantised(directory)
        return None
    found = read(directory)
    if found.weights == "stored":
        raise QuantConfigError(
            f"{where}: the weights in {directory} are packed {found.format}, trainer and engine pack unquantised weights "
            "themselves; give the checkpoint it was made from"
        )
    if rounding is None:
        raise ContractMismatch(
            f"{where}: {directory} was trained with {found.format} rounding, this run has none; give quant and "
            f"engine.nvfp4_experts the options of its {FILE}, or remove that file to go on without"
        )
    names = [name for header in read_headers(directory).values() for name in header.tensors]
    unused = set(scope.ignore.unused(names))
    ignore = [entry for entry in scope.ignore.compact() if entry not in unused]
    require_equal(
        nvfp4_contract(rounding, scope.select(names), source_digest="", producer={}, ignore=ignore),
        found,
        where=f"{where}: {directory}",
    )
    return found


def _refuse_quantised(directory: Path) -> None:
    headers = read_headers(directory)
    _refuse_quantised_shared_experts(headers, (), where=str(directory))
    if packed := quantised_weights(headers):
        raise QuantConfigError(f"{directory} holds quantised weights ({packed[0]}) but no {FILE}. {MAKE_ONE}")


def _refuse_quantised_shared_experts(headers: Mapping[str, Header], listed: Iterable[str], *, where: str) -> None:
    """No trainer of ours rounds a shared expert, so outputs would differ."""
    bad = [n for n in quantised_weights(headers) if is_shared_expert(n) and n not in set(listed)]
    if bad:
        raise QuantConfigError(
            f"{where}: shared experts are quantised ({', '.join(bad[:3])}); make the checkpoint again with `miles convert requantise`"
        )


def write(directory: Path, contract: QuantContract) -> str:
    """Write `quantization_contract.json` atomically; returns its digest."""
    text = contract.canonical()
    if contract.weights == "masters":
        # No config.json and no shard of unquantised weights repeats the digest: the file itself does.
        text = json.dumps({**json.loads(text), DIGEST_KEY: contract.digest()}, sort_keys=True, indent=1)
    write_atomic(Path(directory) / FILE, text + "\n")
    return contract.digest()


def parse(text: str | bytes, *, where: Path | str) -> QuantContract:
    """A contract from JSON; QuantConfigError names the place and every wrong field."""
    return _parse(text, where)[0]


def _parse(text: str | bytes, where: Path | str) -> tuple[QuantContract, str | None]:
    """A contract, and the digest that its file repeats."""
    digest = None
    try:
        values = json.loads(text)
        if isinstance(values, dict) and DIGEST_KEY in values:
            digest = str(values.pop(DIGEST_KEY))
            text = json.dumps(values)
    except (ValueError, RecursionError):
        pass  # said below, in the same words as a wrong field
    try:
        return QuantContract.model_validate_json(text), digest
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise QuantConfigError(f"{where} is no quantisation contract: {faults}. {MAKE_ONE}") from None


def read(directory: Path, *, legacy: Mapping[str, Any] | None = None) -> QuantContract:
    """The contract of a checkpoint, checked against its tensors and the digests in `config.json` and in every shard.

    Without a contract: an error, or with `legacy` (explicit fields: format, decode, four_over_six, tensors, ...) the
    contract that the caller answers for. Quantised shared experts are refused, unless an FP8 contract lists them.
    """
    directory = Path(directory)
    path = directory / FILE
    if not directory.is_dir():
        raise ConversionError(f"{directory}: no such folder; give a checkpoint folder with *.safetensors files")
    headers = read_headers(directory)
    if not path.exists():
        if not headers:
            raise ConversionError(
                f"{directory}: no safetensors file; give a checkpoint folder with *.safetensors files"
            )
        _refuse_quantised_shared_experts(headers, (), where=str(directory))
        if legacy is None:
            raise QuantConfigError(f"{directory} has no {FILE}: it was not made by `miles convert`. {MAKE_ONE}")
        contract = _legacy(legacy)
        _require_tensors(contract, headers, "--accept-legacy")
        return contract
    if legacy is not None:
        raise QuantConfigError(f"{path} is there: --accept-legacy is for checkpoints without it, leave the option out")
    contract, own_digest = _parse(_bytes_of(path), path)
    listed = contract.tensors if contract.format != "nvfp4" else ()
    _refuse_quantised_shared_experts(headers, listed, where=str(directory))
    _require_digest(contract, _repeated_in(directory, contract, own_digest, headers))
    _require_tensors(contract, headers, path)
    return contract


def read_file(directory: Path) -> QuantContract:
    """The contract that is there, its digest compared wherever it is repeated; no more is asked of the weights."""
    contract, own_digest = _parse(_bytes_of(directory / FILE), directory / FILE)
    _require_digest(contract, _repeated_in(directory, contract, own_digest, read_headers(directory)))
    return contract


def _repeated_in(
    directory: Path, contract: QuantContract, own_digest: str | None, headers: Mapping[str, Header]
) -> dict[Path, str | None]:
    """Each file that must repeat the digest, and what it says."""
    config = directory / "config.json"
    if contract.weights == "masters":
        return {directory / FILE: own_digest}
    places: dict[Path, str | None] = {
        directory / shard: header.metadata.get(DIGEST_KEY) for shard, header in headers.items()
    }
    if config.exists():
        places[config] = quantization_of(read_json(config), config).get(DIGEST_KEY)
    return places


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise QuantConfigError(f"{path}: cannot be read: {error.strerror}; make it a file that you may read") from None


def _require_digest(contract: QuantContract, places: Mapping[Path, str | None]) -> None:
    for place, digest in places.items():
        if digest != contract.digest():
            raise ContractMismatch(
                f"{place}: {DIGEST_KEY} is {digest or 'missing'}, {FILE} has {contract.digest()}; these files were not "
                "written together, convert or copy the checkpoint again"
                if contract.weights == "stored"
                else f"{place}: {DIGEST_KEY} is {digest or 'missing'}, its fields give {contract.digest()}: they were changed "
                "after training; export or copy the model again"
            )


def _require_tensors(contract: QuantContract, headers: Mapping[str, Header], path: Path | str) -> None:
    """The contract speaks of tensors that are there, and its `scope_digest` of its tensors."""
    if contract.scope_digest != (digest := scope_digest(contract.tensors)):
        raise ContractMismatch(f"{path}: scope_digest is {contract.scope_digest}, its tensors give {digest}")
    present = {name for header in headers.values() for name in header.tensors}
    if headers and (lost := sorted(set(contract.tensors) - present)):
        raise ContractMismatch(f"{path}: lists {len(lost)} tensors that no shard holds: {', '.join(lost[:3])}")


def _legacy(fields: Mapping[str, Any]) -> QuantContract:
    needed = ("format", "block", "scale_dtype", "decode", "four_over_six", "tensors", "gate_up_shared")
    missing = [f for f in needed if f not in fields]
    if missing:
        raise QuantConfigError(f"--accept-legacy needs every field stated, missing: {', '.join(missing)}")
    names = fields["tensors"] if isinstance(fields["tensors"], list | tuple) else ()
    filled = {
        "scope_digest": scope_digest(str(name) for name in names),
        "source_digest": "legacy",
        "producer": {"conversion": "legacy"},
        "lossless": False,
        **fields,
    }
    return parse(json.dumps(filled), where="--accept-legacy")

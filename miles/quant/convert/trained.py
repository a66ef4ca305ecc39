"""A model that was trained with fake quantisation takes the rounding it was trained with, whatever the conversion."""

from __future__ import annotations

from miles.quant import contract as contracts
from miles.quant.contract import QuantContract
from miles.quant.convert.shards import Source
from miles.quant.errors import ContractMismatch, QuantConfigError
from miles.quant.headers import QUANTISED


def require_trained_rounding(source: Source, kind: str, contract: QuantContract) -> None:
    """`contract` of the result must be the one in the source's folder, if that speaks of unquantised weights.

    A contract that cannot be read does not stop what is quantised: its tensors say what they are, and `requantise`
    makes a new one.
    """
    path = source.directory / contracts.FILE
    if not path.exists():
        return
    packed = any(stored.spec.dtype in QUANTISED for stored in source.tensors.values())
    try:
        found = contracts.read_file(source.directory)
    except ContractMismatch:
        raise
    except QuantConfigError as error:
        if packed:
            return
        raise QuantConfigError(
            f"{path} says how these weights must be rounded, and cannot be read ({error}); copy it again, or remove it to "
            "round them as asked"
        ) from None
    if found.weights == "stored" and packed:
        return
    trained = contracts.read(source.directory)
    if trained.format != contract.format:
        raise ContractMismatch(
            f"{source.directory} was trained with {trained.format} rounding, {kind} would round it to {contract.format}; use "
            f"`miles convert bf16-to-{trained.format}` with the options of its {contracts.FILE}, or remove that file to "
            "round otherwise"
        )
    contracts.require_equal(
        trained,
        contract,
        where=f"{source.directory} was trained with fake quantisation; convert it with the same options",
    )

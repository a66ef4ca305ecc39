"""Make an NVFP4 checkpoint again, to a contract: from NVFP4 or FP8-block checkpoints that have none, or the wrong one.

Everything quantised is decoded to bf16 first; routed experts are then quantised by the asked configuration, all
else (shared experts above all) stays bf16. Rounding twice loses; the contract says `lossless: false`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.codecs import fp8_block, nvfp4
from miles.quant.contract import nvfp4_contract
from miles.quant.convert.bf16 import PairMaxima, nvfp4_item, nvfp4_quantization_config, scope_of
from miles.quant.convert.planning import compact_excludes, keep, producer
from miles.quant.convert.run import Done, Item, Plan, TensorReport, execute
from miles.quant.convert.shards import Source, TensorSpec
from miles.quant.errors import ConversionError
from miles.quant.packed import stored_names
from miles.quant.scope import Scope, check_pairs, gate_up_partner

FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Decoded:
    """A source weight as the conversion sees it: its unquantised shape, the tensors it is made of, and its decoder."""

    name: str
    shape: tuple[int, ...]
    inputs: tuple[str, ...]
    load: Callable[[], torch.Tensor]


def _nvfp4(source: Source, name: str) -> Decoded | None:
    weight, scale, scale_2 = stored_names(name)
    spec = source.tensors[weight].spec
    if spec.dtype != "U8" or scale not in source.tensors or scale_2 not in source.tensors:
        return None
    shape = (*spec.shape[:-1], spec.shape[-1] * 2)
    got = source.tensors[scale].spec.shape
    if got != (*shape[:-1], shape[-1] // nvfp4.BLOCK):
        raise ConversionError(f"{scale}: shape {list(got)} does not fit {name} of {list(shape)}")

    def load() -> torch.Tensor:
        second = source.load(scale_2).reshape((-1, 1, 1) if len(shape) == 3 else (1,))
        packed = nvfp4.Packed(source.load(weight), source.load(scale).view(torch.uint8), second, second)
        return nvfp4.dequantize(packed, NVFP4QDQConfig(decode="stored"), torch.bfloat16)

    extra = [n for n in (scale_2.replace("weight_scale_2", "input_scale"),) if n in source.tensors and n != scale_2]
    return Decoded(name, shape, (weight, scale, scale_2, *extra), load)


def _fp8(source: Source, name: str) -> Decoded | None:
    spec = source.tensors[name].spec
    scale = f"{name}_scale_inv"
    if spec.dtype != "F8_E4M3" or scale not in source.tensors:
        return None

    def load() -> torch.Tensor:
        s = source.load(scale)
        s = s if s.dtype == torch.float32 else s.view(torch.uint8)
        return fp8_block.dequantize(source.load(name).view(torch.uint8), s, torch.bfloat16)

    return Decoded(name, spec.shape, (name, scale), load)


def decoded_weights(source: Source) -> dict[str, Decoded]:
    """Every tensor that the source holds quantised, by name."""
    found = {}
    for name in source.tensors:
        for kind in (_nvfp4, _fp8):
            if source.tensors[name].spec.dtype in ("U8", "F8_E4M3") and (decoded := kind(source, name)) is not None:
                found[name] = decoded
    return found


def _bf16_item(source: Source, d: Decoded) -> Item:
    def run() -> Done:
        inputs = [source.load(n) for n in d.inputs]
        return Done([d.load()], TensorReport(d.name, "decoded to bf16"), inputs)

    return Item(source.tensors[d.name].shard, (TensorSpec(d.name, "BF16", d.shape),), run)


def plan(source: Source, config: NVFP4QDQConfig, scope: Scope) -> Plan:
    decoded = decoded_weights(source)
    consumed = {n for d in decoded.values() for n in d.inputs}
    plain = [n for n in source.tensors if n not in consumed]
    names = scope.select([*decoded, *plain])
    wrong = [n for n in names if n not in decoded and source.tensors[n].spec.dtype not in FLOATS]
    if wrong or not names:
        detail = f"{wrong[0]} is {source.tensors[wrong[0]].spec.dtype}" if wrong else "no routed-expert weight"
        raise ConversionError(
            f"{source.directory}: {detail}; requantise reads NVFP4, FP8 128x128 and unquantised weights"
        )
    try:
        check_pairs(names)
    except ValueError as error:
        raise ConversionError(str(error)) from error

    def load(name: str) -> torch.Tensor:
        return decoded[name].load() if name in decoded else source.load(name)

    chosen, maxima, items = set(names), PairMaxima(load), []
    for name in names:
        stored = source.tensors[name]
        shape = decoded[name].shape if name in decoded else stored.spec.shape
        one = lambda name=name: load(name)  # noqa: E731
        items.append(nvfp4_item(stored.shard, name, shape, one, maxima, gate_up_partner(name), config))
    items += [_bf16_item(source, d) for n, d in decoded.items() if n not in chosen]
    items += keep(source, (n for n in plain if n not in chosen))
    contract = nvfp4_contract(
        config, names, source_digest=source.digest, producer=producer("requantise"), ignore=scope.ignore.compact()
    )
    excluded = compact_excludes((n for n in [*decoded, *plain] if n not in chosen), names)
    new = {k: v for k, v in source.config.items() if k != "quantization_config"}
    new["quantization_config"] = nvfp4_quantization_config(config, excluded)
    options = {"decode": config.decode, "ignore": list(scope.ignore.compact())}
    return Plan("requantise", options, items, contract, new)


def convert(
    source: Path,
    target: Path,
    *,
    config: NVFP4QDQConfig | None = None,
    ignore: Sequence[str] = (),
    bf16_first_layers: int = 0,
    bf16_last_layers: int = 0,
    resume: bool = False,
) -> dict:
    """Requantise `source` into `target` by `config`; returns the report."""
    opened = Source(source)
    scope = scope_of(opened, ignore, bf16_first_layers, bf16_last_layers)
    return execute(opened, target, plan(opened, config or NVFP4QDQConfig(), scope), resume=resume)

"""From a trained array to what a quantised destination stores: values and scales, made once per sync.

The numbers are those of `miles.quant.codecs`; this module knows which arrays a format consists of, where a format
can be cut, and which weights share a tensor scale.

| scale | values | scale array | second scale |
|---|---|---|---|
| tensor | float8_e4m3fn [...] | fp32 [1] | |
| block128_fp32, block128_e8m0 | float8_e4m3fn [M, N] | fp32 or uint8 [ceil(M/128), ceil(N/128)] | |
| mx32_e8m0 | float8_e4m3fn [M, N], or uint8 [M, N/2] (packed E2M1) | uint8 [M, N/32] | |
| nvfp4 | uint8 [M, N/2] | float8_e4m3fn [M, N/16] | fp32 [1] |
The scale array lands in `scale_name`, the second one in `scale_name` + "_2".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.quant.codecs import fp8_block, fp8_tensor, mxfp4, mxfp8, nvfp4
from miles.quant.packed import pair_amax
from miles.quant.scope import gate_up_partner
from miles.sync.entry import SCALE, SCALE_2, VALUES, PlanEntry
from miles.sync.errors import PlanError
from miles.weight_wire.table import EngineTable, ParamEntry

Form = tuple[tuple[int, ...], str]


def stored_form(destination: ParamEntry, name: str, shape: tuple[int, ...]) -> dict[str, Form]:
    """Part -> (shape, wire dtype) of everything a source of `shape` becomes. `PlanError` if the format cannot hold it."""
    kind, dtype = destination.scale, destination.dtype
    if kind == "none":
        return {VALUES: (shape, dtype)}
    if kind == "tensor":
        return {VALUES: (shape, _only(destination, "float8_e4m3fn")), SCALE: ((1,), "float32")}
    if len(shape) != 2:
        raise PlanError(f"{name} {list(shape)}: {kind} of {destination.name} is defined for matrices")
    rows, cols = shape
    if kind.startswith("block128"):
        grid = (-(-rows // 128), -(-cols // 128))
        scale = "uint8" if kind.endswith("e8m0") else "float32"
        return {VALUES: (shape, _only(destination, "float8_e4m3fn")), SCALE: (grid, scale)}
    block = 16 if kind == "nvfp4" else 32
    if cols % block:
        raise PlanError(f"{name} {list(shape)}: {kind} of {destination.name} needs columns in multiples of {block}")
    if kind == "mx32_e8m0":
        values = (rows, cols // 2) if _only(destination, "float8_e4m3fn", "uint8") == "uint8" else shape
        return {VALUES: (values, dtype), SCALE: ((rows, cols // 32), "uint8")}
    values = (rows, cols // 2)
    return {
        VALUES: (values, _only(destination, "uint8")),
        SCALE: ((rows, cols // 16), "float8_e4m3fn"),
        SCALE_2: ((1,), "float32"),
    }


def targets_of(destination: ParamEntry, table: EngineTable) -> dict[str, ParamEntry]:
    """Part -> the engine's entry for it, described as fused and cut like the destination itself."""
    targets = {VALUES: destination}
    if destination.scale == "none":
        return targets
    names = {SCALE: destination.scale_name}
    if destination.scale == "nvfp4":
        names[SCALE_2] = f"{destination.scale_name}_2"
    for part, name in names.items():
        entry = table.by_name.get(name or "")
        if entry is None or not entry.filled_by_sync or entry.pieces != destination.pieces:
            raise PlanError(
                f"{destination.name} ({destination.scale}) needs its {part} in {name!r} with {destination.pieces} "
                "pieces, which the engine's table does not have"
            )
        whole = part == SCALE_2 or destination.scale == "tensor"
        targets[part] = replace(
            entry,
            fused_from=destination.fused_from or (destination.name,),
            num_shards=destination.num_shards,
            num_local_experts=destination.num_local_experts,
            shard_dim=None if whole else destination.shard_dim,
        )
    return targets


def check_cuts(destination: ParamEntry, shapes: Sequence[tuple[int, ...]], tp: int) -> None:
    """`PlanError` when a fused border or a tensor-parallel cut would go through a block."""
    blocks = {"block128_fp32": (128, 128), "block128_e8m0": (128, 128), "mx32_e8m0": (1, 32), "nvfp4": (1, 16)}
    block = blocks.get(destination.scale)
    if block is None:
        return
    dim = destination.shard_dim
    cut = tp if dim is not None else 1
    for index, shape in enumerate(shapes):
        if cut > 1 and dim is not None and (shape[dim] // cut) % block[dim]:
            raise PlanError(f"{destination.name}: tp {tp} cuts {list(shape)} through a block of {destination.scale}")
        rows = shape[0] // (cut if dim == 0 else 1)
        if (index + 1) % destination.num_shards and rows % block[0]:
            raise PlanError(
                f"{destination.name}: {rows} rows of piece {index} end inside a block of {destination.scale}; the engine "
                "must keep these weights separate"
            )


def atomic_group(destination: ParamEntry, name: str) -> str:
    """Gate and up in NVFP4 share their tensor scale, so they travel together even into separate destinations."""
    partner = gate_up_partner(name) if destination.scale == "nvfp4" else None
    if partner is None or destination.fused_from:
        return destination.name
    return f"{min(name, partner)}+{max(name, partner)}"


def encode_group(
    group: Sequence[tuple[PlanEntry, torch.Tensor]], nvfp4_config: NVFP4QDQConfig
) -> list[tuple[PlanEntry, torch.Tensor]]:
    """Each entry with the array it sends: this layout's slice of the source, or of what the codec makes of it."""
    sources = {entry.hf_name: tensor for entry, tensor in group}
    made: dict[str, dict[str, torch.Tensor]] = {}
    ready = []
    for entry, tensor in group:
        if entry.codec != "none":
            if entry.hf_name not in made:
                made[entry.hf_name] = _encode(entry, sources, nvfp4_config)
            tensor = made[entry.hf_name][entry.part]
        for dim, (start, stop) in enumerate(entry.slice or ()):
            tensor = tensor.narrow(dim, start, stop - start)
        ready.append((entry, tensor))
    return ready


def _encode(entry: PlanEntry, sources: dict[str, torch.Tensor], config: NVFP4QDQConfig) -> dict[str, torch.Tensor]:
    name, kind, fp8 = entry.hf_name, entry.codec, torch.float8_e4m3fn
    weight = sources[name]
    if kind == "tensor":
        codes, scale = fp8_tensor.quantize(weight, name=name)
        return {VALUES: codes.view(fp8), SCALE: scale}
    if kind.startswith("block128"):
        codes, scale = fp8_block.quantize(weight, scale="e8m0" if kind.endswith("e8m0") else "fp32", name=name)
        return {VALUES: codes.view(fp8), SCALE: scale}
    if kind == "mx32_e8m0":
        packed = entry.values_dtype == "uint8"
        codes, scale = (mxfp4 if packed else mxfp8).quantize(weight, name=name)
        return {VALUES: codes if packed else codes.view(fp8), SCALE: scale}
    partner = sources.get(gate_up_partner(name) or "")
    amax = None if partner is None else pair_amax(weight, partner)
    stored = nvfp4.quantize(weight, config, amax=amax, name=name)
    return {VALUES: stored.weight, SCALE: stored.weight_scale.view(fp8), SCALE_2: stored.weight_scale_2}


def _only(destination: ParamEntry, *allowed: str) -> str:
    if destination.dtype not in allowed:
        raise PlanError(
            f"{destination.name}: {destination.scale} is stored as {' or '.join(allowed)}, the engine holds "
            f"{destination.dtype}"
        )
    return destination.dtype

"""Layouts of quantised weights that people have and a conversion may not read, by the names that people know."""

from __future__ import annotations

from miles.quant.convert.shards import Source

_BY_SUFFIX = {
    "_blocks": ("_scales", "gpt-oss MXFP4 (`*_blocks` with `*_scales`, all experts of a layer in one tensor)"),
    "_scales": ("_blocks", "gpt-oss MXFP4 (`*_blocks` with `*_scales`, all experts of a layer in one tensor)"),
    ".qweight": (".qzeros", "GPTQ or AWQ (`*.qweight` with `*.qzeros` and `*.scales`)"),
    ".weight_packed": (".weight_scale", "compressed-tensors (`*.weight_packed`)"),
}


def layout_of(source: Source, name: str) -> str | None:
    """The layout that `name` is a part of, judged by its name and what stands beside it."""
    for suffix, (beside, layout) in _BY_SUFFIX.items():
        if name.endswith(suffix) and name.removesuffix(suffix) + beside in source.tensors:
            if suffix == ".weight_packed" and name.removesuffix(suffix) + ".weight_global_scale" in source.tensors:
                return "compressed-tensors NVFP4 (`*.weight_packed` with `*.weight_global_scale`)"
            return layout
    spec = source.tensors[name].spec
    if spec.dtype == "F4":
        return "safetensors dtype F4"
    if spec.dtype == "F8_E4M3" and len(spec.shape) == 2 and name.endswith(".weight"):
        rows, cols = spec.shape
        grids = {(-(-rows // 32), -(-cols // 32)): "FP8 in 32x32 blocks", (rows, -(-cols // 32)): "MXFP8 (1x32 blocks)"}
        for scale in ("weight_scale_inv", "weight_scale", "scale"):
            stored = source.tensors.get(name.removesuffix("weight") + scale)
            if stored is not None and stored.spec.shape in grids:
                return grids[stored.spec.shape]
    return None

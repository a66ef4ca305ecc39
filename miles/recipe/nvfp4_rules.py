"""What stops a run with NVFP4 rounding that can be known before it starts: options, environment, names, widths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles.quant.config import NVFP4Options
from miles.quant.errors import QuantConfigError
from miles.quant.nvfp4_config import GATE, fake_qat_gate
from miles.recipe.schema import Recipe

# Values that share a scale: they lie along a weight's last dimension, which is cut into whole blocks.
BLOCK = 16
Objection = tuple[str, str]


def objections(recipe: Recipe, hf_config: Mapping[str, Any], where: str) -> Iterator[Objection]:
    """(what is wrong, what to do) for the sections quant and engine. `where`: the place of `hf_config`."""
    trainer = recipe.quant.nvfp4 if recipe.quant.fake_qat == "nvfp4" else None
    engine = recipe.engine.nvfp4_experts
    if trainer != engine:
        message = f"quant.nvfp4 is {trainer!r} in the trainer but engine.nvfp4_experts is {engine!r}"
        yield message, "give both the same options: they must round alike"
    if recipe.quant.fake_qat == "none" and fake_qat_gate():
        message = f"quant.fake_qat is none but {GATE}=1: the trainer would round weights that the engine does not"
        yield message, "unset the variable, or set quant.fake_qat=nvfp4"
    if recipe.quant.fake_qat == "nvfp4" and recipe.quant.nvfp4 is None:
        message = "quant.fake_qat is nvfp4 without quant.nvfp4, so the environment would decide"
        yield message, "write the options out under quant.nvfp4"
    if trainer is None:
        return
    if not hf_config.get("num_experts"):
        yield (
            f"quant.fake_qat is nvfp4 but {where} has no routed experts",
            "use an MoE family, or set quant.fake_qat=none",
        )
        return
    try:
        recipe.quant.fake_qat_config()
    except QuantConfigError as error:
        yield _split(error, "unset the NVTE_NVFP4_* variables")
    yield from _experts(recipe, trainer, hf_config, where)


def _experts(recipe: Recipe, options: NVFP4Options, hf_config: Mapping[str, Any], where: str) -> Iterator[Objection]:
    """The entries name experts of this model, and every chosen weight's rows are whole blocks on each rank."""
    from miles.models import registry

    shapes = {name: shape for name, shape, _ in registry.resolve(hf_config, where=where).shapes(hf_config)}
    try:
        chosen = options.scope(shapes, hf_config).select(shapes)
    except QuantConfigError as error:
        yield _split(error, "lower the bf16 layers, or shorten ignore, in both quant.nvfp4 and engine.nvfp4_experts")
        return
    for name in chosen:
        # Tensor parallelism cuts the rows of down projections.
        down = name.endswith(("down_proj", "down_proj.weight"))
        ranks = recipe.train.parallel.expert_tp if down else 1
        columns = shapes[name][-1]
        if columns % (ranks * BLOCK):
            shared = f" over {ranks} ranks (train.parallel.etp)" if ranks > 1 else ""
            key = "expert_ffn_hidden_size" if down else "hidden_size"
            fix = f"set model.create.{key} to a multiple of {ranks * BLOCK}"
            if recipe.model.path is not None:
                fix = "use a model of another width, lower train.parallel.etp, or set quant.fake_qat=none"
            yield f"{name} has rows of {columns} values{shared}, NVFP4 rounds blocks of {BLOCK}", fix
            return


def _split(error: Exception, otherwise: str) -> Objection:
    """An error's text without its advice, and the advice."""
    message, _, fix = str(error).rpartition("; ")
    return (message, fix) if message else (fix, otherwise)

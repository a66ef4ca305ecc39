"""Arithmetic of a parallel layout against a model's shape, before any process starts."""

from __future__ import annotations

from miles.models.family import FamilyConfig
from miles.train.config import ParallelConfig
from miles.train.errors import ParallelismError


def check_parallelism(parallel: ParallelConfig, model: FamilyConfig) -> None:
    """Raise one error that lists every impossible size, each with its numbers and a way out."""
    problems = [*_tensor_problems(parallel, model), *_pipeline_problems(parallel, model)]
    problems += _expert_problems(parallel, model)
    if problems:
        raise ParallelismError("\n".join(f"train.parallel.{problem}" for problem in problems))


def _tensor_problems(parallel: ParallelConfig, model: FamilyConfig) -> list[str]:
    problems = []
    sizes = [("attention heads", model.heads), ("key/value groups", model.groups)]
    if not model.num_experts:
        sizes.append(("feed-forward width", model.ffn_hidden_size))
    for name, size in sizes:
        if size % parallel.tp:
            problems.append(f"tp={parallel.tp} does not divide the model's {size} {name}; use a divisor of {size}")
    return problems


def _pipeline_problems(parallel: ParallelConfig, model: FamilyConfig) -> list[str]:
    if parallel.pp == 1:
        return []
    layers, stages = model.num_layers, parallel.pp
    if parallel.last_pp_layers is not None:
        if parallel.vpp is not None:
            return ["last_pp_layers cannot be combined with vpp; use a layer count that pp*vpp divides"]
        rest = layers - parallel.last_pp_layers
        if rest <= 0 or rest % (stages - 1):
            return [
                f"last_pp_layers={parallel.last_pp_layers} leaves {rest} of {layers} layers for {stages - 1} stages; "
                f"the rest must be a positive multiple of {stages - 1}"
            ]
        return []
    chunks = stages * (parallel.vpp or 1)
    if layers % chunks:
        return [
            f"pp={stages}" + (f" with vpp={parallel.vpp}" if parallel.vpp else "") + f" does not divide the model's "
            f"{layers} layers; choose pp (times vpp) among the divisors of {layers} or set last_pp_layers"
        ]
    return []


def _expert_problems(parallel: ParallelConfig, model: FamilyConfig) -> list[str]:
    if not model.num_experts:
        if parallel.ep > 1:
            return [f"ep={parallel.ep} but the model has no experts; use ep=1 and dp instead"]
        if parallel.etp is not None and parallel.etp != parallel.tp:
            return [f"etp={parallel.etp} but the model has no experts; remove etp"]
        return []
    problems = []
    if model.num_experts % parallel.ep:
        problems.append(f"ep={parallel.ep} does not divide the model's {model.num_experts} experts")
    width = int(model.transformer["moe_ffn_hidden_size"])
    if width % parallel.expert_tp:
        problems.append(f"etp={parallel.expert_tp} does not divide the expert width {width}")
    if parallel.tp > 1 and not parallel.sp:
        problems.append(f"sp=false with tp={parallel.tp}: megatron-core's experts need sequence parallel; set sp=true")
    return problems

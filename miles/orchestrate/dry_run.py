"""`miles train --dry-run`: everything that can be said before anything starts, the placement included."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from miles.orchestrate.startable import check_place, check_start
from miles.recipe.rules import model_facts
from miles.recipe.schema import Recipe, digest

# Adam on fp32 masters: master, two moments, one gradient.
OPTIMIZER_BYTES = 16
GIB = 1 << 30


def parameter_count(recipe: Recipe) -> int:
    """Parameters of the model, from its config alone."""
    from miles.models import registry

    facts = model_facts(recipe)
    family = registry.resolve(facts.hf_config, where=facts.where)
    total = 0
    for _, shape, _ in family.shapes(facts.hf_config):
        size = 1
        for dimension in shape:
            size *= dimension
        total += size
    return total


def describe(recipe: Recipe, overrides: Sequence[str], console: Console) -> None:
    """Apply the rules and place the run, then print the plan: processes, memory, batch. Raises on an error.

    An existing cluster is asked what it has; nothing is started on it.
    """
    findings, placement = check_start(recipe), check_place(recipe)
    parallel, rollout = recipe.train.parallel, recipe.rollout
    parameters = parameter_count(recipe)
    sharded = parameters / (parallel.tp * parallel.pp)
    weight_bytes = 4 if recipe.train.precision == "fp32" else 2
    per_rank = sharded * (OPTIMIZER_BYTES + weight_bytes)

    table = Table(title=f"{recipe.name} (digest {digest(recipe)[:16]})", show_header=False)
    table.add_row("model", f"{recipe.model.family}, {parameters:,} parameters")
    table.add_row(
        "trainer", f"{parallel.world_size} rank(s): tp {parallel.tp} pp {parallel.pp} cp {parallel.cp} dp {parallel.dp}"
    )
    if not recipe.supervised:
        table.add_row("engine", f"{recipe.engine.count} x {recipe.engine.engine} on {recipe.engine.device}")
    table.add_row("memory per rank", f"{per_rank / GIB:.3f} GiB for weights, gradients and optimizer")
    samples = f"{rollout.batch_groups} prompts x {rollout.group_size} = {recipe.samples_per_step} samples"
    table.add_row("step", f"{recipe.samples_per_step} examples" if recipe.supervised else samples)
    table.add_row("steps", f"{recipe.run.steps}, checkpoint every {recipe.run.checkpoint_every}")
    for process, where in placement.describe():
        table.add_row(process, where)
    console.print(table)
    for finding in findings:
        console.print(f"{finding.severity}: {finding}", highlight=False, markup=False, soft_wrap=True)
    arguments = "".join(f" --set {text}" for text in overrides)
    started = f"dry run: nothing was started{' with' + arguments if arguments else ''}"
    console.print(started, highlight=False, markup=False, soft_wrap=True)

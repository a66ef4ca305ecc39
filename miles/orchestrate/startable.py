"""Whether a run may start, in one place: `miles recipe check`, `--dry-run` and the run itself ask the same questions.

Nothing is started. Left out: what only the device or a running engine can say (memory, driver versions).
"""

from __future__ import annotations

from miles.orchestrate.placed_cluster import known_facts
from miles.orchestrate.placement import Placement, place
from miles.orchestrate.preflight import check_host, check_port, check_trackers
from miles.recipe import Recipe
from miles.recipe.rules import Finding, check_or_raise
from miles.recipe.warm_start import first_recipe
from miles.rollout.engines.sglang.interpreter import check_interpreter
from miles.train import installed


def check_start(recipe: Recipe) -> list[Finding]:
    """Warnings for a run that may start; `ConfigError` for rules, files, prompts, trackers, engine host, port or interpreter
    that stop it, those of the phase before it (`model.from_recipe`) first."""
    first = first_recipe(recipe)
    before = [] if first is None else check_start(first)
    findings = before + check_or_raise(recipe)
    check_trackers(recipe.observe)
    if not recipe.supervised:
        check_host(recipe.engine.host)
        check_port(recipe.engine)
        if recipe.engine.engine == "sglang":
            check_interpreter(recipe.engine)
    return findings


def check_place(recipe: Recipe) -> Placement:
    """Where the run would go now; `PlacementError` where it has no place, `ConfigError` where this machine cannot train.

    An existing cluster is asked what it has.
    """
    installed.require()
    return place(recipe, known_facts(recipe.cluster))

"""What stops a run with SGLang engines that can be known before they start: options that such a server would ignore."""

from __future__ import annotations

from collections.abc import Iterator

from miles.recipe.schema import Recipe

Objection = tuple[str, str]
TRANSPORTS = ("auto", "tensor")


def sglang_objections(recipe: Recipe) -> Iterator[Objection]:
    """(what is wrong, what to do)."""
    rollout, sync = recipe.rollout, recipe.sync
    if rollout.needs_sampling_mask:
        yield (
            "rollout.top_p, top_k and min_p cut the distribution, and what an SGLang server kept of it is not read",
            "leave them at 1, -1 and 0, or use engine.engine=embedded",
        )
    if rollout.ignore_eos and rollout.stop_token_ids:
        yield (
            "rollout.ignore_eos makes an SGLang server ignore rollout.stop_token_ids, too",
            "leave one of the two out, or use engine.engine=embedded",
        )
    if sync.transport not in TRANSPORTS:
        yield (
            f"sync.transport {sync.transport} is not offered for SGLang engines",
            "use sync.transport=tensor (engines on the trainer's host), or engine.engine=embedded",
        )
    if sync.pause == "in_place":
        yield (
            "sync.pause in_place keeps keys and values of older weights, which an SGLang server then cannot flush",
            "use sync.pause=retract or abort",
        )
    if recipe.placement.mode == "colocated":
        yield (
            "placement.mode colocated has engines release their memory, which is not asked of SGLang engines",
            "use placement.mode=disaggregated, or engine.engine=embedded",
        )

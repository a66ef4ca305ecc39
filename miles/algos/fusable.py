"""Which configurations a fused kernel computes. Imports no torch, so that a rule of the recipe can ask too."""

from __future__ import annotations

from miles.algos.config import AlgoConfig

FUSED_LOSSES = ("ppo_clip", "dual_clip", "cispo")


def why_not_fused(
    config: AlgoConfig, *, tensor_parallel: int = 1, on_policy: bool = False, on_support: bool = False
) -> str | None:
    """None when `miles.algos.fused.fused_objective` computes this configuration, else the reason.

    `on_policy`: samples carry no log-probs of the old policy, nor are the rollout's used (`correction.bypass`). `on_support`: they are scored on the sampler's support.
    """
    if config.loss not in FUSED_LOSSES:
        return f"loss {config.loss} has no kernel ({', '.join(FUSED_LOSSES)} have: functions of one token's log-prob)"
    if tensor_parallel > 1:
        return "logits are split over tensor-parallel ranks"
    if on_support:
        return "log-probs are taken on the sampler's support"
    if config.kl.where == "loss":
        return "a KL term is part of the loss"
    if config.entropy_coef > 0.0:
        return "an entropy bonus is part of the loss"
    if config.opsm is not None:
        return "OPSM looks at whole sequences of the current policy"
    if on_policy and (config.correction.active or config.opd_coef > 0.0):
        return "corrections and distillation need old log-probs before the pass"
    return None

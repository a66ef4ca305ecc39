"""The objective of one micro-batch: what a training backend differentiates, and the metrics of a step.

`step_objective` returns a scalar whose plain sum over all micro-batches, data-parallel and context-parallel
ranks is the loss of the step: denominators are already inside the batch's weights. A backend whose framework
averages over ranks must undo that. `MetricSums` add up the same way; `finish` turns them into named numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles.algos.config import AlgoConfig
from miles.algos.corrections import importance_weights, opsm_mask
from miles.algos.kl import estimate
from miles.algos.losses import log_ratio, masked, policy_loss, reduce_loss, value_loss
from miles.algos.metrics import MetricSums, objective_metrics
from miles.algos.sequences import Sequences
from miles.config import MilesError
from miles.data.tensors import BatchTensors

if TYPE_CHECKING:
    import torch.distributed as dist


class NonFiniteError(MilesError):
    """A value on an active token is NaN or infinite (`algo.nonfinite: raise`)."""


def step_objective(
    log_probs: torch.Tensor,
    batch: BatchTensors,
    config: AlgoConfig,
    *,
    entropy: torch.Tensor | None = None,
    support_mass: torch.Tensor | None = None,
    kl_exact: torch.Tensor | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, MetricSums]:
    """Loss (fp32 scalar with gradient) and metric sums of one micro-batch or context-parallel slice of it.

    log_probs: fp32 [n] of `batch.target_ids`, with gradient. entropy: fp32 [n], needed when `entropy_coef` > 0,
    reported when given. support_mass: fp32 [n], reported. kl_exact: fp32 [n], needed by `support_exact`. Without
    old log-probs the step is on-policy: old := log_probs.detach(). `ValueError` names a missing field.
    """
    mask = batch.mask
    sequences = Sequences(batch.sequence, batch.token_counts, cp_group)
    old = log_probs.detach() if _is_on_policy(batch, config) else old_log_probs(batch, config)
    log_probs, old, mask, bad = check_finite(log_probs, old, batch, config)
    advantages = distilled_advantages(batch, old, mask, config)
    reference = _reference(batch, config)
    policy = policy_loss(log_probs, old, advantages, mask, sequences, config, ref_log_probs=reference)
    correction = None
    if config.correction.active:
        correction = importance_weights(old, rollout_log_probs(batch, config), mask, sequences, config.correction)
    pg = policy.loss if correction is None else policy.loss * correction.weights
    if config.opsm is not None:
        kept = opsm_mask(log_probs.detach(), old, advantages, mask, sequences, delta=config.opsm.delta)
        pg = masked(pg, kept)
    pg_loss = reduce_loss(pg, batch.weights)
    total = pg_loss
    kl = _kl_term(log_probs, old, mask, batch, config, kl_exact)
    kl_loss = None
    if kl is not None:
        kl_loss = reduce_loss(kl, batch.weights)
        total = total + config.kl.coef * kl_loss
    entropy_mean = None
    if entropy is not None:
        entropy_mean = reduce_loss(entropy, batch.weights)
        if config.entropy_coef > 0.0:
            total = total - config.entropy_coef * entropy_mean
    elif config.entropy_coef > 0.0:
        raise ValueError("algo.entropy_coef is above 0 but the backend computed no entropy; pass entropy")
    sums = objective_metrics(
        log_probs.detach(),
        old,
        mask,
        batch,
        sequences,
        policy=policy,
        correction=correction,
        entropy=entropy,
        kl=kl,
        support_mass=support_mass,
        losses={"loss": total, "pg_loss": pg_loss, "kl_loss": kl_loss},
        nonfinite=bad,
    )
    return total, sums


def value_objective(values: torch.Tensor, batch: BatchTensors, config: AlgoConfig) -> tuple[torch.Tensor, MetricSums]:
    """Critic loss of one micro-batch. values: fp32 [n], prediction before each response token, with gradient."""
    if batch.values is None or batch.returns is None:
        raise ValueError("the critic loss needs old values and returns; run the critic over the rollout and use gae")
    per_token = value_loss(values, batch.values, batch.returns, batch.mask, eps=config.value.eps_clip)
    loss = reduce_loss(per_token, batch.weights)
    return loss, MetricSums.of_losses({"value_loss": loss.detach()})


def _is_on_policy(batch: BatchTensors, config: AlgoConfig) -> bool:
    return batch.old_log_probs is None and not config.correction.bypass


def old_log_probs(batch: BatchTensors, config: AlgoConfig) -> torch.Tensor:
    """The old policy's log-probs that the batch carries: the trainer's, or the rollout's under `bypass`."""
    found = batch.rollout_log_probs if config.correction.bypass else batch.old_log_probs
    if found is None:
        name = "algo.correction.bypass uses the rollout's" if config.correction.bypass else "the loss uses old"
        raise ValueError(f"{name} log-probs, but the samples have none")
    return found


def rollout_log_probs(batch: BatchTensors, config: AlgoConfig) -> torch.Tensor:
    """The engine's log-probs, which a correction compares with."""
    if batch.rollout_log_probs is None:
        raise ValueError(
            f"algo.correction (mode {config.correction.mode}) compares with the rollout's log-probs, but the samples "
            "have none; use an engine that returns them, or remove the correction"
        )
    return batch.rollout_log_probs


def check_finite(
    log_probs: torch.Tensor, old: torch.Tensor, batch: BatchTensors, config: AlgoConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raise, or take the broken tokens out so that the backend can skip the step (`nonfinite_tokens` > 0)."""
    read = _read_by_the_loss(log_probs, old, batch, config)
    finite = torch.stack([torch.isfinite(value) for value in read.values()]).all(dim=0)
    broken = batch.mask & ~finite
    if config.nonfinite == "raise":
        if bool(broken.any()):
            at = int(broken.nonzero()[0])
            sample = batch.sample_ids[int(batch.sequence[at])]
            values = ", ".join(f"{name} {float(value[at]):g}" for name, value in read.items())
            raise NonFiniteError(
                f"sample {sample!r}, response index {int(batch.response_index[at])}: {values}; lower the learning rate "
                "or inspect the step with `miles replay`; algo.nonfinite=skip_step goes on without this step"
            )
        return log_probs, old, batch.mask, broken.sum()
    return masked(log_probs, finite), masked(old, finite), batch.mask & finite, broken.sum()


def _read_by_the_loss(
    log_probs: torch.Tensor, old: torch.Tensor, batch: BatchTensors, config: AlgoConfig
) -> dict[str, torch.Tensor]:
    """What enters this configuration's loss at each token, by the name that an error gives it."""
    read = {"log-prob": log_probs.detach(), "old log-prob": old, "advantage": batch.advantages}
    if config.correction.active and batch.rollout_log_probs is not None:
        read["rollout log-prob"] = batch.rollout_log_probs
    if (config.kl.where == "loss" or config.declared_loss.reference) and batch.ref_log_probs is not None:
        read["reference log-prob"] = batch.ref_log_probs
    if config.opd_coef > 0.0 and batch.teacher_log_probs is not None:
        read["teacher log-prob"] = batch.teacher_log_probs
    return read


def distilled_advantages(
    batch: BatchTensors, old: torch.Tensor, mask: torch.Tensor, config: AlgoConfig
) -> torch.Tensor:
    """Advantages, 0 at masked tokens, less opd_coef·(old - teacher)."""
    advantages = masked(batch.advantages, mask)
    if config.opd_coef == 0.0:
        return advantages
    if batch.teacher_log_probs is None:
        raise ValueError(
            "algo.opd_coef is above 0 but the samples have no teacher_log_probs; score them with a teacher"
        )
    return advantages - config.opd_coef * masked(old - batch.teacher_log_probs, mask)


def _reference(batch: BatchTensors, config: AlgoConfig) -> torch.Tensor | None:
    """The start policy's log-probs for a loss that declares them."""
    if not config.declared_loss.reference:
        return None
    if batch.ref_log_probs is None:
        raise ValueError(
            f"algo.loss {config.loss} declares a reference, but the samples have no ref_log_probs; score them with the "
            "reference model first"
        )
    return batch.ref_log_probs


def _kl_term(
    log_probs: torch.Tensor,
    old: torch.Tensor,
    mask: torch.Tensor,
    batch: BatchTensors,
    config: AlgoConfig,
    kl_exact: torch.Tensor | None,
) -> torch.Tensor | None:
    if config.kl.where != "loss":
        return None
    if config.kl.estimator == "support_exact":
        if kl_exact is None:
            raise ValueError(
                "algo.kl.estimator support_exact needs policy and reference scores on the sampler's support; sample "
                "with top-p, top-k or min-p and a backend that scores supports, or use k2"
            )
        value = masked(kl_exact, mask)
    else:
        if batch.ref_log_probs is None:
            raise ValueError(
                f"algo.kl.where=loss ({config.kl.estimator}) needs ref_log_probs, but the samples have none; score "
                "them with the reference model first, or set algo.kl.where=none"
            )
        value = estimate(config.kl.estimator, masked(log_probs - batch.ref_log_probs, mask))
    if config.kl.unbiased:
        value = value * log_ratio(log_probs, old, mask).exp()
    return value


__all__ = [
    "MetricSums",
    "NonFiniteError",
    "check_finite",
    "distilled_advantages",
    "old_log_probs",
    "rollout_log_probs",
    "step_objective",
    "value_objective",
]

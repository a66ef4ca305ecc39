"""`step_objective` straight from logits, for the losses whose gradient is known row by row.

One visit of each row computes log-prob, entropy, loss and gradient (`miles.kernels.log_probs.fused_policy_loss`), so
the logits' second read comes from cache and no log-prob graph is kept. Same loss, gradient and metrics as
`step_objective` up to rounding. What it cannot do is named by `miles.algos.fusable`.
"""

from __future__ import annotations

from typing import Any

import torch

from miles.algos.config import AlgoConfig
from miles.algos.corrections import importance_weights
from miles.algos.fusable import why_not_fused
from miles.algos.log_probs import check_temperature, target_check
from miles.algos.losses import masked, policy_loss
from miles.algos.metrics import MetricSums, objective_metrics
from miles.algos.objective import check_finite, distilled_advantages, old_log_probs, rollout_log_probs
from miles.algos.sequences import Sequences
from miles.data.tensors import BatchTensors
from miles.kernels.log_probs import PolicyTerm, fused_policy_loss, scale_


def fused_objective(
    logits: torch.Tensor,
    batch: BatchTensors,
    config: AlgoConfig,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    rows: torch.Tensor | None = None,
    cp_group: torch.distributed.ProcessGroup | None = None,
    inplace: bool = False,
) -> tuple[torch.Tensor, MetricSums]:
    """Loss (scalar with gradient to `logits` [T, V]) and metric sums of one micro-batch.

    rows: int64 [n], distinct: the logit row of each response token (`batch.logit_index`); None: they are in order.

    `inplace` lets the gradient take the logits' memory: the caller must not read them afterwards.
    `ValueError` names the option that needs `step_objective` instead.
    """
    on_policy = batch.old_log_probs is None and not config.correction.bypass
    reason = why_not_fused(config, on_policy=on_policy)
    if reason is not None:
        raise ValueError(f"fused_objective: {reason}; use step_objective")
    check_temperature(temperature)
    refuse_outside = target_check(batch.target_ids, vocab_size)
    sequences = Sequences(batch.sequence, batch.token_counts, cp_group)
    old = None if on_policy else old_log_probs(batch, config)
    weights, advantages, correction = batch.weights, masked(batch.advantages, batch.mask), None
    if old is not None:
        advantages = distilled_advantages(batch, old, batch.mask, config)
        if config.correction.active:
            correction = importance_weights(
                old, rollout_log_probs(batch, config), batch.mask, sequences, config.correction
            )
            weights = weights * correction.weights
    term = PolicyTerm(
        advantages.contiguous(),
        masked(weights, batch.mask).contiguous(),
        None if old is None else old.contiguous(),
        loss=config.loss,  # type: ignore[arg-type]
        low=1.0 - config.eps_clip,
        high=1.0 + config.clip_high,
        dual_c=config.dual_clip_c or 1.0,
    )
    losses, log_probs, entropy = _Fused.apply(logits, batch.target_ids, rows, term, vocab_size, temperature, inplace)
    refuse_outside()
    total = losses.sum()
    before = log_probs if old is None else old
    log_probs, before, mask, bad = check_finite(log_probs, before, batch, config)
    with torch.no_grad():
        policy = policy_loss(log_probs, before, advantages, mask, sequences, config)
        # Where a token was broken the step is skipped; its loss is still told without that token.
        told = masked(losses, mask).sum()
    sums = objective_metrics(
        log_probs,
        before,
        mask,
        batch,
        sequences,
        policy=policy,
        correction=correction,
        entropy=entropy,
        kl=None,
        support_mass=None,
        losses={"loss": told, "pg_loss": told, "kl_loss": None},
        nonfinite=bad,
    )
    return total, sums


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        rows: torch.Tensor | None,
        term: PolicyTerm,
        vocab_size: int,
        temperature: float,
        inplace: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = fused_policy_loss(
            logits.detach(),
            targets,
            term,
            rows=rows,
            valid=vocab_size,
            temperature=temperature,
            inplace=inplace,
            with_entropy=True,
        )
        assert found.entropy is not None
        ctx.grad = found.grad
        ctx.mark_non_differentiable(found.log_probs, found.entropy)
        return found.losses, found.log_probs, found.entropy

    @staticmethod
    def backward(ctx: Any, grad_losses: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
        # The rows' losses are only ever summed, so every element of the incoming gradient is the same scalar.
        grad, ctx.grad = ctx.grad, None
        if grad is None:
            raise RuntimeError("fused_objective: its backward can run once; compute the objective again")
        if grad_losses.numel():
            scale_(grad, grad_losses.reshape(-1)[:1])
        return (grad, *(None,) * 6)

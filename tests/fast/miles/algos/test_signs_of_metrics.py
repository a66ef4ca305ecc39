"""Numbers against the table of metric names: what is declared never negative never is, the rest really can be."""

from __future__ import annotations

from dataclasses import replace

import torch

from miles.algos.config import AlgoConfig, CorrectionConfig, KLConfig
from miles.algos.objective import step_objective
from miles.algos.step_batches import prepare_steps
from miles.config.metric_names import SIGNED
from miles.data.batch_layout import BatchLayout
from miles.data.schedule import ScheduleConfig
from miles.data.tensors import to_tensors
from miles.rollout.metrics import rollout_metrics


def test_only_metrics_declared_signed_are_negative(make_samples) -> None:
    config = AlgoConfig(
        kl=KLConfig(where="loss", estimator="k3", coef=0.1),
        correction=CorrectionConfig(mode="mask", hi=1.3, veto=1e-3),
        opd_coef=0.5,
    )
    seen: dict[str, list[float]] = {}
    for seed in range(12):
        samples = [replace(sample, reward=sample.reward - 1.0) for sample in make_samples(6, seed=seed)]
        schedule = ScheduleConfig(data_parallel=1, max_tokens_per_gpu=1000, layout=BatchLayout("thd"))
        (micro_batch,) = (mb for rank in prepare_steps(samples, config, schedule).steps[0].ranks for mb in rank)
        batch = to_tensors(micro_batch)
        torch.manual_seed(seed)
        log_probs = (batch.old_log_probs + 0.3 * torch.randn(len(batch.mask))).requires_grad_(True)
        _, sums = step_objective(log_probs, batch, config, entropy=torch.full_like(log_probs, 0.5))
        metrics = sums.finish() | rollout_metrics([samples], [])
        for name, value in metrics.items():
            seen.setdefault(name, []).append(value)
    negative = {name for name, values in seen.items() if min(values) < 0}
    assert negative <= SIGNED
    measured = {"rollout/reward_mean", "rollout/reward_mean_all", "train/loss", "train/pg_loss", "train/ppo_kl"}
    assert measured | {"train/teacher_kl"} <= negative

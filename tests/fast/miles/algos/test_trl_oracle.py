"""Our loss and gradient against TRL's own `GRPOTrainer._compute_loss`, called on a stand-in trainer."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from miles.algos.config import AlgoConfig, KLConfig, OPSMConfig
from miles.algos.objective import step_objective
from miles.algos.step_batches import prepare_steps
from miles.data.batch import TrainBatch
from miles.data.schedule import ScheduleConfig
from miles.data.tensors import to_tensors


@pytest.fixture(scope="module")
def trainer_class():
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


class StandIn(SimpleNamespace):
    """What `_compute_loss` reads from a trainer: log-probs are handed in instead of computed."""

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any):
        return self.log_probs, self.entropies, None


def trl_loss(trainer_class, *, log_probs, mask, advantages, old, reference, **options) -> torch.Tensor:
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    arguments = {
        "loss_type": "grpo",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "off_policy_mask_threshold": None,
        "delta": None,
        "use_bias_correction_kl": False,
        "max_completion_length": mask.shape[1],
        "entropy_coef": 0.0,
    } | options
    stand_in = StandIn(
        log_probs=log_probs,
        entropies=torch.zeros_like(log_probs),
        accelerator=accelerator,
        args=SimpleNamespace(
            delta=arguments["delta"],
            use_bias_correction_kl=arguments["use_bias_correction_kl"],
            steps_per_generation=1,
        ),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        **{k: v for k, v in arguments.items() if k not in ("delta", "use_bias_correction_kl")},
    )
    rows = len(mask)
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    return trainer_class._compute_loss(stand_in, None, inputs)


def grid(batch, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    """Flat [n] to TRL's padded [S, R]; differentiable."""
    out = torch.full((len(batch.sample_ids), int(batch.response_index.max()) + 1), fill)
    return out.index_put((batch.sequence, batch.response_index), values)


# ours -> TRL's names of the same thing
CASES = {
    "grpo, sequence mean of token means": (AlgoConfig(), {"loss_type": "grpo"}),
    "clip-higher": (AlgoConfig(eps_clip=0.1, eps_clip_high=0.3), {"epsilon_low": 0.1, "epsilon_high": 0.3}),
    "bnpo / token mean": (AlgoConfig(reduction="token_mean"), {"loss_type": "bnpo"}),
    "dapo / token mean over the step": (AlgoConfig(reduction="token_mean"), {"loss_type": "dapo"}),
    "dr_grpo / fixed": (AlgoConfig(reduction="fixed", fixed_length=9), {"loss_type": "dr_grpo", "max_completion_length": 9}),
    "gspo": (AlgoConfig(loss="gspo", eps_clip=0.03), {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.03}),
    "cispo": (
        # TRL clamps the ratio from above at epsilon_high itself and not from below.
        AlgoConfig(loss="cispo", reduction="token_mean", eps_clip=0.999999, eps_clip_high=0.1),
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "k3 in the loss": (AlgoConfig(kl=KLConfig(where="loss", estimator="k3", coef=0.4)), {"beta": 0.4}),
    "k3 in the loss, unbiased": (
        AlgoConfig(kl=KLConfig(where="loss", estimator="k3", coef=0.4, unbiased=True)),
        {"beta": 0.4, "use_bias_correction_kl": True},
    ),
    "opsm": (AlgoConfig(opsm=OPSMConfig(delta=0.02)), {"off_policy_mask_threshold": 0.02}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_trl(trainer_class, make_samples, name):
    config, options = CASES[name]
    samples = make_samples(8, seed=5, group_size=4)
    for sample in samples:
        sample.loss_mask[:] = 1  # TRL keeps a fully masked row in its mean; ours does not count it
    step: TrainBatch = prepare_steps(samples, config, ScheduleConfig(max_tokens_per_gpu=4096)).steps[0]
    batch = to_tensors(step.ranks[0][0])
    noise = torch.from_numpy(np.random.default_rng(7).normal(0, 0.2, len(batch.target_ids)).astype(np.float32))
    log_probs = (batch.old_log_probs + noise).requires_grad_(True)
    ours, _ = step_objective(log_probs, batch, config)
    (our_gradient,) = torch.autograd.grad(ours, log_probs)
    theirs = trl_loss(
        trainer_class,
        log_probs=grid(batch, log_probs),
        mask=grid(batch, batch.mask.float()),
        advantages=grid(batch, batch.advantages)[:, 0],
        old=grid(batch, batch.old_log_probs),
        reference=grid(batch, batch.ref_log_probs),
        **options,
    )
    (their_gradient,) = torch.autograd.grad(theirs, log_probs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-8)
    assert float(our_gradient.abs().max()) > 0

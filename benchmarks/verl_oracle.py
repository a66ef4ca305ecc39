"""Our advantages, losses and KL against verl's own functions, on one random batch.

    pip install --no-deps --target DIR verl==0.9.1 "tensordict>=0.8,<=0.10" omegaconf antlr4-python3-runtime==4.9.3 \\
        codetiming hydra-core torchdata pyvers cloudpickle importlib_metadata zipp dill pylatexenc peft
    PYTHONPATH=DIR python benchmarks/verl_oracle.py

verl installs without CUDA but asks for an older transformers than ours, so it lives in a folder of its own and not
in the development extra (docs/decisions/0300). Prints the largest difference of each formula; exit code 1 when one
is above its tolerance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from miles.algos.advantages.gae import gae
from miles.algos.advantages.grpo import grpo
from miles.algos.advantages.reinforce_pp import reinforce_pp
from miles.algos.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from miles.algos.advantages.rloo import rloo
from miles.algos.advantages.whiten import whiten
from miles.algos.config import AlgoConfig
from miles.algos.kl import estimate
from miles.algos.losses import policy_loss, reduce_loss, value_loss
from miles.algos.sequences import Sequences
from miles.data.batch import Denominators

ROWS, WIDTH, GROUP = 12, 10, 4
RELATIVE = 1e-5


class Batch:
    """Padded [S, R] tensors for verl and the same numbers flat [n] for ours; every row has an active token."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.mask = (torch.rand(ROWS, WIDTH) < 0.8).float()
        self.mask[:, 0] = 1.0
        self.old = torch.randn(ROWS, WIDTH) - 2.0
        self.new = self.old + 0.15 * torch.randn(ROWS, WIDTH)
        self.reference = self.old + 0.3 * torch.randn(ROWS, WIDTH)
        self.values, self.returns = torch.randn(2, ROWS, WIDTH)
        self.rewards = torch.rand(ROWS)
        self.groups = np.arange(ROWS) // GROUP
        self.lengths = np.full(ROWS, WIDTH)
        last = WIDTH - 1 - self.mask.flip(1).argmax(1)
        self.token_rewards = torch.zeros(ROWS, WIDTH)
        self.token_rewards[torch.arange(ROWS), last] = self.rewards

    @property
    def flat_mask(self) -> np.ndarray:
        return self.mask.flatten().numpy().astype(np.uint8)


def advantages(batch: Batch, core) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    rewards, everyone = batch.rewards.double().numpy(), np.ones(ROWS, dtype=bool)
    config = SimpleNamespace(gamma=0.9)
    index = batch.groups

    def spread(per_rollout: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(per_rollout)[:, None] * batch.mask

    def whitened(flat: np.ndarray) -> torch.Tensor:
        return whiten(torch.from_numpy(flat), torch.from_numpy(batch.flat_mask)).reshape(ROWS, WIDTH)

    tokens = batch.token_rewards.flatten().double().numpy()
    raw, returns = gae(tokens, batch.values.flatten().numpy(), batch.flat_mask, batch.lengths, gamma=0.9, lam=0.8)
    theirs = core.compute_gae_advantage_return(batch.token_rewards, batch.values, batch.mask, 0.9, 0.8)
    arguments = (batch.token_rewards.clone(), batch.mask)
    baseline = reinforce_pp_baseline(rewards, index, everyone, np.arange(ROWS), batch.flat_mask, batch.lengths)
    return {
        "grpo": (
            spread(grpo(rewards, index, everyone)),
            core.compute_grpo_outcome_advantage(*arguments, index)[0],
        ),
        "Dr. GRPO": (
            spread(grpo(rewards, index, everyone, normalize_std=False)),
            core.compute_grpo_outcome_advantage(*arguments, index, norm_adv_by_std_in_grpo=False)[0],
        ),
        "rloo": (spread(rloo(rewards, index, everyone)), core.compute_rloo_outcome_advantage(*arguments, index)[0]),
        "gae, whitened": (whitened(raw) * batch.mask, theirs[0] * batch.mask),
        "gae returns": (torch.from_numpy(returns).reshape(ROWS, WIDTH), theirs[1] * batch.mask),
        "reinforce++": (
            whitened(reinforce_pp(tokens, batch.flat_mask, batch.lengths, gamma=0.9)),
            core.compute_reinforce_plus_plus_outcome_advantage(*arguments, config=config)[0],
        ),
        "reinforce++ baseline": (
            whitened(baseline),
            core.compute_reinforce_plus_plus_baseline_outcome_advantage(*arguments, index)[0],
        ),
    }


def losses(batch: Batch, core) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Value and gradient, concatenated, under each reduction that both name."""
    out = {}
    per_row = torch.randn(ROWS, 1).expand(ROWS, WIDTH) * batch.mask
    counts = torch.full((ROWS,), WIDTH)
    sequences = Sequences(torch.arange(ROWS).repeat_interleave(WIDTH), counts)
    active = batch.mask.flatten() > 0
    per_token_count = batch.mask.sum(1, keepdim=True).expand(ROWS, WIDTH).flatten().numpy()
    ours_of: dict[str, tuple[AlgoConfig, str]] = {
        # verl's "vanilla" always bounds A < 0 by clip_ratio_c: ours names that dual_clip.
        "dual_clip": (AlgoConfig(loss="dual_clip", dual_clip_c=3.0, eps_clip=0.1, eps_clip_high=0.2), "vanilla"),
        "gspo": (AlgoConfig(loss="gspo", eps_clip=0.02, eps_clip_high=0.03), "gspo"),
        "cispo": (AlgoConfig(loss="cispo", eps_clip=0.1, eps_clip_high=0.2), "cispo"),
    }
    reductions = {"token_mean": "token-mean", "rollout_mean": "seq-mean-token-mean"}
    for name, (config, theirs) in ours_of.items():
        verl_config = verl_actor(config.eps_clip, config.clip_high)
        for reduction, mode in reductions.items():
            if name == "gspo" and reduction == "token_mean":
                # verl passes each token its own gradient; the sums agree only where a sequence is averaged.
                continue
            leaf = batch.new.clone().requires_grad_(True)
            policy = policy_loss(leaf.flatten(), batch.old.flatten(), per_row.flatten(), active, sequences, config)
            scalars = Denominators(ROWS, int(batch.mask.sum()), reduction)
            weights = torch.from_numpy(scalars.weights(batch.flat_mask, per_token_count))
            mine = reduce_loss(policy.loss, weights)
            (my_grad,) = torch.autograd.grad(mine, leaf)
            loss, _ = core.get_policy_loss_fn(theirs)(
                batch.old, leaf, per_row, batch.mask, loss_agg_mode=mode, config=verl_config
            )
            (their_grad,) = torch.autograd.grad(loss, leaf)
            out[f"{name}, {reduction}"] = (
                torch.cat([mine.detach()[None], my_grad.flatten()]),
                torch.cat([loss.detach()[None], their_grad.flatten()]),
            )
    mine = value_loss(batch.new.flatten(), batch.values.flatten(), batch.returns.flatten(), active, eps=0.2)
    loss, _ = core.compute_value_loss(batch.new, batch.returns, batch.values, batch.mask, 0.2)
    out["value loss, token_mean"] = (mine.sum() / batch.mask.sum(), loss)
    return out


def verl_actor(low: float, high: float):
    """verl's actor configuration with the fields that its losses read; its own checks want a whole training set-up."""
    from verl.workers.config import ActorConfig

    config = object.__new__(ActorConfig)
    fields = {"clip_ratio": low, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": 3.0}
    for name, value in {**fields, "global_batch_info": {}}.items():
        object.__setattr__(config, name, value)
    return config


def kl(batch: Batch, core) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {
        f"kl {ours}": (estimate(ours, batch.new - batch.reference), core.kl_penalty(batch.new, batch.reference, theirs))
        for ours, theirs in (("k1", "k1"), ("k2", "k2"), ("low_var", "low_var_kl"))
    }


def main() -> int:
    try:
        import verl
        from verl.trainer.ppo import core_algos
    except ImportError as error:
        print(f"verl cannot be imported ({error}); install it as the head of this file says", file=sys.stderr)
        return 2
    checks: list[Callable[[Batch, object], dict[str, tuple[torch.Tensor, torch.Tensor]]]] = [advantages, losses, kl]
    worst = 0.0
    print(f"verl {getattr(verl, '__version__', '?')}")
    for check in checks:
        for name, (mine, theirs) in check(Batch(), core_algos).items():
            difference = float((mine.double() - theirs.double()).norm() / theirs.double().norm())
            worst = max(worst, difference)
            print(f"{name:32s} relative difference {difference:.1e}  {'ok' if difference <= RELATIVE else 'DIFFERS'}")
    return 0 if worst <= RELATIVE else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Loss and gradient of a whole step against the definition, written as loops over single tokens in float64.

Random steps hold what breaks implementations: failed, truncated, removed and unrewarded rollouts, siblings, groups of
one and of equal rewards, one-token responses, fully masked samples, steps in which nothing counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algos.config import AlgoConfig, CorrectionConfig, KLConfig, OPSMConfig, RejectConfig
from miles.algos.metrics import MetricSums
from miles.algos.objective import step_objective
from miles.algos.step_batches import prepare_steps
from miles.data.batch_layout import BatchLayout
from miles.data.sample import Sample, Status
from miles.data.schedule import ScheduleConfig
from miles.data.tensors import to_tensors

# Rewards, values and discounts are multiples of powers of two: fp32 holds them and their differences exactly.
REWARDS = (0.0, 0.25, 0.5, 1.0, None)
STATUSES = (*[Status.COMPLETED] * 5, Status.TRUNCATED, Status.ABORTED, Status.FAILED, Status.ENV_ERROR)


@st.composite
def steps(draw) -> list[Sample]:
    samples: list[Sample] = []
    rollout = 0
    for group in range(draw(st.integers(1, 3))):
        same = draw(st.booleans())
        shared = draw(st.sampled_from(REWARDS[:4]))
        for _ in range(draw(st.integers(1, 4))):
            reward = shared if same else draw(st.sampled_from(REWARDS))
            for segment in range(draw(st.sampled_from([1, 1, 1, 2]))):
                samples.append(_sample(draw, group, rollout, segment, reward, len(samples)))
            rollout += 1
    return samples


def _sample(draw, group: int, rollout: int, segment: int, reward: float | None, number: int) -> Sample:
    response = draw(st.sampled_from([1, 1, 2, 3, 5]))
    rng = np.random.default_rng(number * 17 + response)

    def near(spread: float) -> np.ndarray:
        return (rng.standard_normal(response) * spread - 2.0).astype(np.float32)

    return Sample(
        f"s{number}",
        group,
        rollout,
        np.arange(1, 3 + response),
        2,
        segment=segment,
        loss_mask=np.array(draw(st.lists(st.sampled_from([0, 1, 1]), min_size=response, max_size=response)), np.uint8),
        rollout_log_probs=near(0.5),
        old_log_probs=near(0.5),
        ref_log_probs=near(0.5),
        values=(rng.integers(-8, 9, response) / 8).astype(np.float32),
        reward=reward,
        status=draw(st.sampled_from(STATUSES)),
        removed=draw(st.sampled_from([False] * 7 + [True])),
    )


CONFIGS = {
    "grpo": AlgoConfig(),
    "dr_grpo": AlgoConfig(normalize_std=False, reduction="fixed", fixed_length=5, mask_truncated=True),
    "drop": AlgoConfig(zero_variance="drop", reduction="token_mean", loss="dual_clip", dual_clip_c=1.5),
    "rloo": AlgoConfig(advantage="rloo", loss="cispo", eps_clip=0.1, eps_clip_high=0.3),
    "gspo": AlgoConfig(loss="gspo", eps_clip=0.05, reduction="token_mean", entropy_coef=0.25),
    "ppo": AlgoConfig(advantage="gae", gamma=0.5, gae_lambda=0.5, eps_clip_high=0.5),
    "reinforce_pp": AlgoConfig(advantage="reinforce_pp", gamma=0.5, reduction="token_mean"),
    "baseline": AlgoConfig(advantage="reinforce_pp_baseline", kl=KLConfig(where="reward", estimator="k2", coef=0.5)),
    "kl": AlgoConfig(kl=KLConfig(where="loss", estimator="low_var", coef=0.5, unbiased=True)),
    "tis": AlgoConfig(correction=CorrectionConfig(mode="truncate", level="geometric", hi=1.1)),
    "icepop": AlgoConfig(correction=CorrectionConfig(mode="mask", hi=1.5), reduction="token_mean"),
    "mis": AlgoConfig(
        correction=CorrectionConfig(
            mode="clip", level="sequence", hi=4.0, reject=RejectConfig(level="geometric", hi=1.4), veto=0.3
        ),
        opsm=OPSMConfig(delta=0.1),
    ),
    "bypass": AlgoConfig(correction=CorrectionConfig(bypass=True), mask_truncated=True),
}


@dataclass
class Counts:
    masks: list[list[int]]
    advantages: list[list[float]]
    per_rollout: dict[int, int]
    rollouts: int
    tokens: int


def count(samples: list[Sample], config: AlgoConfig) -> Counts:
    members: dict[int, list[Sample]] = {}
    for sample in samples:
        members.setdefault(sample.rollout_id, []).append(sample)
    judged = {
        number: all(s.status in (Status.COMPLETED, Status.TRUNCATED) for s in parts) and parts[0].reward is not None
        for number, parts in members.items()
    }
    group_rewards: dict[int, list[float]] = {}
    for number, parts in members.items():
        if judged[number]:
            group_rewards.setdefault(parts[0].group_id, []).append(parts[0].reward)
    flat = {g: len(r) < 2 or max(r) - min(r) <= 1e-8 for g, r in group_rewards.items()}
    masks = []
    for s in samples:
        out = not judged[s.rollout_id] or s.removed or (config.mask_truncated and s.status == Status.TRUNCATED)
        out = out or (config.zero_variance == "drop" and flat[s.group_id])
        masks.append([0] * s.response_length if out else s.loss_mask.tolist())
    per_rollout = dict.fromkeys(members, 0)
    for s, mask in zip(samples, masks, strict=True):
        per_rollout[s.rollout_id] += sum(mask)
    advantages = []
    for s, mask in zip(samples, masks, strict=True):
        rewards = group_rewards.get(s.group_id, [])
        advantages.append(one_advantage(s, mask, rewards, judged[s.rollout_id], flat.get(s.group_id, True), config))
    if config.advantage in ("gae", "reinforce_pp", "reinforce_pp_baseline"):
        advantages = whitened(advantages, masks)
    counted = sum(n > 0 for n in per_rollout.values())
    return Counts(masks, advantages, per_rollout, counted, sum(per_rollout.values()))


def one_advantage(s: Sample, mask: list[int], rewards: list[float], ok: bool, flat: bool, config) -> list[float]:
    n, kind = s.response_length, config.advantage
    mean = sum(rewards) / max(len(rewards), 1)
    if kind in ("grpo", "rloo"):
        if not ok or flat:
            return [0.0] * n
        if kind == "rloo":
            return [s.reward - (sum(rewards) - s.reward) / (len(rewards) - 1)] * n
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) + 1e-6
        return [(s.reward - mean) / (std if config.normalize_std else 1.0)] * n
    d = s.old_log_probs.astype(float) - s.ref_log_probs.astype(float)
    penalty = config.kl.coef * d**2 / 2 if config.kl.where == "reward" else np.zeros(n)
    if kind == "reinforce_pp_baseline":
        return [(s.reward - mean if ok else 0.0) - penalty[t] for t in range(n)]
    active = [t for t in range(n) if mask[t]]
    out = [0.0] * n
    following_value = following = 0.0
    for t in reversed(active):
        reward = -penalty[t] + (s.reward if t == active[-1] else 0.0)
        if kind == "reinforce_pp":
            following = out[t] = reward + config.gamma * following
        else:
            delta = reward + config.gamma * following_value - float(s.values[t])
            following = out[t] = delta + config.gamma * config.gae_lambda * following
            following_value = float(s.values[t])
    return out


def whitened(advantages: list[list[float]], masks: list[list[int]]) -> list[list[float]]:
    xs = [a for row, mask in zip(advantages, masks, strict=True) for a, m in zip(row, mask, strict=True) if m]
    if len(xs) <= 1:
        return [[0.0] * len(row) for row in advantages]
    mean = sum(xs) / len(xs)
    scale = 1.0 / math.sqrt(sum((x - mean) ** 2 for x in xs) / (len(xs) - 1) + 1e-8)
    return [[(a - mean) * scale for a in row] for row in advantages]


def token_loss(config: AlgoConfig, logp, ratio, a: float):
    low, high = 1 - config.eps_clip, 1 + config.clip_high
    clipped = min(max(float(ratio.detach()), low), high)
    if config.loss == "cispo":
        return -clipped * a * logp
    plain, bounded = -ratio * a, torch.tensor(-clipped * a, dtype=torch.float64)
    if float(ratio.detach()) == clipped:
        bounded = plain
    loss = plain if bool(plain >= bounded) else bounded
    if config.loss == "dual_clip" and a < 0 and bool(loss > -config.dual_clip_c * a):
        loss = torch.tensor(-config.dual_clip_c * a, dtype=torch.float64)
    return loss


def correction_weights(config: CorrectionConfig, d: list[float]) -> list[float]:
    """d: old - rollout log-probs of a sequence's active tokens."""
    if not config.active:
        return [1.0] * len(d)

    def level(name: str) -> list[float]:
        whole = {"token": d, "sequence": [sum(d)] * len(d), "geometric": [sum(d) / max(len(d), 1)] * len(d)}
        return [math.exp(min(max(x, -20), 20)) for x in whole[name]]

    out = []
    judged = level(config.reject.level) if config.reject else [1.0] * len(d)
    vetoed = config.veto is not None and any(math.exp(x) < config.veto for x in d)
    for w, j in zip(level(config.level), judged, strict=True):
        value = {
            "none": 1.0,
            "truncate": min(w, config.hi),
            "clip": min(max(w, config.low), config.hi),
            "mask": w if config.low <= w <= config.hi else 0.0,
        }[config.mode]
        rejected = vetoed or (config.reject is not None and not config.reject.low <= j <= config.reject.hi)
        out.append(0.0 if rejected else value)
    return out


def oracle(samples: list[Sample], logp: list[torch.Tensor], entropy: list[torch.Tensor], config: AlgoConfig):
    """The loss of the step, float64 with gradient to `logp`."""
    counts = count(samples, config)
    total = sum((x.sum() for x in logp), torch.zeros((), dtype=torch.float64)) * 0.0
    for s, mask, advantages, new, ent in zip(samples, counts.masks, counts.advantages, logp, entropy, strict=True):
        active = [t for t in range(len(mask)) if mask[t]]
        old = (s.rollout_log_probs if config.correction.bypass else s.old_log_probs).astype(float)
        weights = correction_weights(config.correction, [old[t] - float(s.rollout_log_probs[t]) for t in active])
        moved = sum((new[t] - old[t] for t in active), torch.zeros((), dtype=torch.float64)) / max(len(active), 1)
        for weight, t in zip(weights, active, strict=True):
            ratio = (moved if config.loss == "gspo" else new[t] - old[t]).clamp(-20, 20).exp()
            a = advantages[t]
            pg = weight * token_loss(config, new[t], ratio, a)
            if config.opsm is not None and a < 0 and bool(-moved > config.opsm.delta):
                pg = pg * 0.0
            value = pg - config.entropy_coef * ent[t]
            if config.kl.where == "loss":
                d = (new[t] - float(s.ref_log_probs[t])).clamp(-20, 20)
                kl = (torch.expm1(-d) + d).clamp(-10, 10)
                value = value + config.kl.coef * kl * ((new[t] - old[t]).clamp(-20, 20).exp())
            divisor = {
                "rollout_mean": counts.rollouts * counts.per_rollout[s.rollout_id],
                "token_mean": counts.tokens,
                "fixed": counts.rollouts * (config.fixed_length or 1),
            }[config.reduction]
            total = total + value / divisor
    return total, counts


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=15)
@given(data=st.data())
def test_loss_and_gradient_of_a_step_equal_the_definition(name, data):
    config, samples = CONFIGS[name], data.draw(steps())
    schedule = ScheduleConfig(
        data_parallel=data.draw(st.sampled_from([1, 2, 3])),
        max_tokens_per_gpu=data.draw(st.sampled_from([7, 14, 100])),
        layout=BatchLayout(data.draw(st.sampled_from(["thd", "bshd"]))),
        balance=data.draw(st.sampled_from(["none", "tokens"])),
    )
    generator = torch.Generator().manual_seed(len(samples))
    moved = [torch.randn(s.response_length, generator=generator, dtype=torch.float64) * 0.3 for s in samples]
    base = [
        torch.from_numpy((s.rollout_log_probs if config.correction.bypass else s.old_log_probs).astype(float))
        for s in samples
    ]
    logp = [(b + m).float().double().requires_grad_(True) for b, m in zip(base, moved, strict=True)]
    entropy = [torch.rand(s.response_length, generator=generator, dtype=torch.float64) for s in samples]
    expected, counts = oracle(samples, logp, entropy, config)
    expected_grads = torch.autograd.grad(expected, logp)

    (batch,) = prepare_steps(samples, config, schedule).steps
    assert batch.denominators.rollouts == counts.rollouts
    assert batch.denominators.tokens == counts.tokens
    if counts.rollouts == 0:
        assert all(batch.for_rank(rank).skip for rank in range(schedule.data_parallel))
        return
    leaves = [x.detach().float().requires_grad_(True) for x in logp]
    loss, sums = torch.zeros(()), MetricSums.zeros()
    for micro_batch in (mb for rank in batch.ranks for mb in rank):
        index = micro_batch.sample_index.tolist()
        new = torch.cat([leaves[i] if i >= 0 else torch.zeros(1, requires_grad=True) for i in index])
        ent = torch.cat([entropy[i].float() if i >= 0 else torch.zeros(1) for i in index])
        part, part_sums = step_objective(new, to_tensors(micro_batch), config, entropy=ent)
        loss, sums = loss + part, sums + part_sums
    torch.testing.assert_close(loss.double(), expected, rtol=2e-4, atol=2e-5)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        got = torch.zeros_like(wanted) if grad is None else grad.double()
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)
    metrics = sums.finish()
    assert metrics["train/loss"] == pytest.approx(float(expected.detach()), rel=2e-4, abs=2e-5)
    if counts.tokens:
        spread = [
            float(x)
            for ent, mask in zip(entropy, counts.masks, strict=True)
            for x, m in zip(ent, mask, strict=True)
            if m
        ]
        assert metrics["train/entropy"] == pytest.approx(sum(spread) / counts.tokens, rel=1e-4)

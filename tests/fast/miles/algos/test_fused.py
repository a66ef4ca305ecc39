from __future__ import annotations

import pytest
import torch

from miles.algos.config import AlgoConfig, CorrectionConfig, KLConfig, OPSMConfig, RejectConfig
from miles.algos.fusable import why_not_fused
from miles.algos.fused import fused_objective
from miles.algos.log_probs import vocab_parallel_scores
from miles.algos.objective import NonFiniteError, step_objective
from miles.algos.step_batches import prepare_steps
from miles.data.schedule import ScheduleConfig
from miles.data.tensors import to_tensors

VOCAB, WIDTH = 23, 26
CONFIGS = {
    "ppo_clip": AlgoConfig(),
    "dual_clip": AlgoConfig(loss="dual_clip", dual_clip_c=1.5),
    "cispo": AlgoConfig(loss="cispo", reduction="token_mean"),
    "distilled": AlgoConfig(opd_coef=0.4),
    "TIS + MIS": AlgoConfig(correction=CorrectionConfig(mode="truncate", hi=1.2, reject=RejectConfig(hi=1.1))),
    "bypass": AlgoConfig(correction=CorrectionConfig(bypass=True)),
}


def problem(make_samples, config, *, on_policy=False):
    samples = make_samples(7, vocab=VOCAB, seed=2)
    samples[1].loss_mask[:] = 0
    if on_policy:
        for sample in samples:
            sample.old_log_probs = None
    batch = to_tensors(prepare_steps(samples, config, ScheduleConfig()).steps[0].ranks[0][0])
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(batch.target_ids), WIDTH, generator=generator) * 0.7
    # Ratios near 1: the target's logit carries the old log-prob.
    logits[:, :VOCAB] -= 2.0
    return logits.requires_grad_(True), batch


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_fused_equals_step_objective_in_loss_gradient_and_metrics(make_samples, name, scale, inplace):
    config = CONFIGS[name]
    logits, batch = problem(make_samples, config)
    log_probs, entropy = vocab_parallel_scores(
        logits, batch.target_ids, vocab_size=VOCAB, temperature=0.9, entropy="value"
    )
    expected, sums = step_objective(log_probs, batch, config, entropy=entropy)
    (expected_grad,) = torch.autograd.grad(scale * expected, logits)
    leaf = logits.detach().clone().requires_grad_(True)
    loss, fused_sums = fused_objective(leaf * 1.0, batch, config, vocab_size=VOCAB, temperature=0.9, inplace=inplace)
    (grad,) = torch.autograd.grad(scale * loss, leaf)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-6)
    assert float(grad.abs().max()) > 0
    metrics, others = sums.finish(), fused_sums.finish()
    assert metrics.keys() == others.keys()
    for key, value in metrics.items():
        assert others[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_the_second_clip_binds_where_a_ratio_is_far_above_it(make_samples):
    """Bad tokens that became much more likely: the loss of each is at most c times its advantage."""
    losses = {}
    for c in (1.5, 1e6):
        config = AlgoConfig(loss="dual_clip", dual_clip_c=c)
        logits, batch = problem(make_samples, config)
        with torch.no_grad():
            logits[torch.arange(len(batch.target_ids)), batch.target_ids] += 6.0
        log_probs = vocab_parallel_scores(logits, batch.target_ids, vocab_size=VOCAB)[0]
        expected, _ = step_objective(log_probs, batch, config)
        losses[c], _ = fused_objective(logits * 1.0, batch, config, vocab_size=VOCAB)
        torch.testing.assert_close(losses[c], expected, rtol=1e-5, atol=1e-6)
    assert losses[1.5] < losses[1e6] - 0.1


def test_on_policy_needs_no_old_log_probs(make_samples):
    config = AlgoConfig()
    logits, batch = problem(make_samples, config, on_policy=True)
    log_probs = vocab_parallel_scores(logits, batch.target_ids, vocab_size=VOCAB)[0]
    expected, _ = step_objective(log_probs, batch, config)
    (expected_grad,) = torch.autograd.grad(expected, logits)
    loss, sums = fused_objective(logits, batch, config, vocab_size=VOCAB)
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-6)
    assert sums.finish()["train/ratio_mean"] == 1.0


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (AlgoConfig(loss="gspo"), {}, "loss gspo has no kernel"),
        (AlgoConfig(loss="sft"), {}, "loss sft"),
        (AlgoConfig(), {"tensor_parallel": 2}, "tensor-parallel"),
        (AlgoConfig(), {"on_support": True}, "sampler's support"),
        (AlgoConfig(loss="python:own:f"), {}, "loss python:own:f has no kernel"),
        (AlgoConfig(kl=KLConfig(where="loss", estimator="k2", coef=1.0)), {}, "KL term"),
        (AlgoConfig(entropy_coef=0.1), {}, "entropy bonus"),
        (AlgoConfig(opsm=OPSMConfig(delta=1.0)), {}, "OPSM"),
        (AlgoConfig(opd_coef=1.0), {"on_policy": True}, "need old log-probs"),
    ],
)
def test_what_cannot_be_fused_is_named(make_samples, config, options, reason):
    assert reason in (why_not_fused(config, **options) or "")
    if not options:
        logits, batch = problem(make_samples, AlgoConfig())
        with pytest.raises(ValueError, match=r"fused_objective: .*use step_objective"):
            fused_objective(logits, batch, config, vocab_size=VOCAB)


def test_errors_are_those_of_the_plain_path(make_samples):
    config = AlgoConfig()
    logits, batch = problem(make_samples, config)
    with pytest.raises(ValueError, match="outside the vocabulary of 3 tokens"):
        fused_objective(logits, batch, config, vocab_size=3)
    with torch.no_grad():
        logits[int(batch.mask.nonzero()[0])] = torch.nan
    with pytest.raises(NonFiniteError, match="sample 's"):
        fused_objective(logits, batch, config, vocab_size=VOCAB)


def test_a_broken_token_under_skip_step_is_counted_and_left_out_of_the_told_loss(make_samples):
    config = AlgoConfig(nonfinite="skip_step")
    logits, batch = problem(make_samples, config)
    with torch.no_grad():
        logits[int(batch.mask.nonzero()[0])] = torch.nan
    log_probs, _ = vocab_parallel_scores(logits, batch.target_ids, vocab_size=VOCAB)
    _, expected = step_objective(log_probs, batch, config)
    _, sums = fused_objective(logits, batch, config, vocab_size=VOCAB)
    assert sums.nonfinite_tokens == expected.nonfinite_tokens == 1
    assert sums.finish()["train/loss"] == pytest.approx(expected.finish()["train/loss"], rel=1e-4)


def test_the_backward_runs_once(make_samples):
    logits, batch = problem(make_samples, AlgoConfig())
    loss, _ = fused_objective(logits, batch, AlgoConfig(), vocab_size=VOCAB)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="its backward can run once"):
        loss.backward()


def test_rows_inside_the_pass_equal_rows_picked_before(make_samples):
    logits, batch = problem(make_samples, AlgoConfig())
    everything = torch.randn(2 * len(logits) + 1, WIDTH)
    rows = torch.arange(len(logits)) * 2 + 1
    everything[rows] = logits.detach()
    everything.requires_grad_(True)
    expected, _ = fused_objective(logits, batch, AlgoConfig(), vocab_size=VOCAB)
    (expected_grad,) = torch.autograd.grad(expected, logits)
    loss, _ = fused_objective(everything, batch, AlgoConfig(), vocab_size=VOCAB, rows=rows)
    (grad,) = torch.autograd.grad(loss, everything)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad[rows], expected_grad)
    assert not grad[::2].any()

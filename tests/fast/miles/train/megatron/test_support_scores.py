"""Scores on the sampler's support: log-probs, exact KL to the reference, and samples that have no response at all."""

from __future__ import annotations

import math

import numpy as np
import pytest


def masked_samples(toolbox):
    """Samples whose sampler chose among a few ids at each token."""
    from miles.data.sampling_mask import RolloutSamplingMask

    samples = toolbox.samples(ragged=True)
    generator = np.random.default_rng(0)
    for sample in samples:
        response = sample.tokens[sample.prompt_length :]
        rows = [sorted({int(token), *generator.choice(15, size=4).tolist()}) for token in response]
        sample.sampling_mask = RolloutSamplingMask.from_rows(rows, vocab_size=15)
    return samples


def support_scores(toolbox, model_dir, **parallel):
    """Body of a rank: support log-probs of the masked samples, step metrics, and the samples' order."""

    def body(rank, world, port):
        from miles.algos.config import AlgoConfig
        from miles.algos.step_batches import prepare_steps
        from miles.data.batch_layout import BatchLayout
        from miles.data.schedule import ScheduleConfig

        backend = toolbox.backend(model_dir, rank, world, port, **parallel)
        samples = masked_samples(toolbox)
        schedule = ScheduleConfig(layout=BatchLayout("thd", context_parallel=parallel.get("cp", 1), use_support=True))
        batch = prepare_steps(samples, AlgoConfig(), schedule).steps[0].for_rank(0)
        order = [int(index) for item in batch.micro_batches for index in item.sample_index]
        return np.concatenate(backend.score(batch, model="policy", output="log_probs")), order, backend.step(batch)

    return body


@pytest.fixture(scope="module")
def support_ref_log_probs(ranks, toolbox, model_dir):
    """By sample: log-softmax over each row's support, from logits of transformers' model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    reference = []
    for sample in masked_samples(toolbox):
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens)[None]).logits[0]
        mask, values = sample.sampling_mask, []
        for at in range(sample.response_length):
            row = torch.from_numpy(mask.ids[mask.offsets[at] : mask.offsets[at + 1]].astype(np.int64))
            position = sample.prompt_length + at
            chosen = int((row == int(sample.tokens[position])).nonzero()[0, 0])
            values.append(logits[position - 1][row].log_softmax(0)[chosen].item())
        reference.append(values)
    return reference


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"cp": 2}], ids=["single", "tp2", "cp2"])
def test_log_probs_on_the_samplers_support(parallel, ranks, toolbox, model_dir, support_ref_log_probs):
    scores, order, metrics = ranks(support_scores(toolbox, model_dir, **parallel), 2 if parallel else 1)[0]
    expected = np.concatenate([support_ref_log_probs[index] for index in order])
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    assert 0 < metrics["mismatch/support_mass_min"] <= metrics["mismatch/support_mass_mean"] <= 1


EXACT_MESHES = [{}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"dp": 2}, {"cp": 2, "pp": 2}]


def exact_kl(toolbox, model_dir, **parallel):
    """Body of a rank: the reference's scores by sample, then a step of exact KL alone after the reference moved."""

    def body(rank, world, port):
        from miles.algos.config import AlgoConfig, KLConfig
        from miles.algos.step_batches import gather_scores, prepare_scoring, prepare_steps
        from miles.data.batch_layout import BatchLayout
        from miles.data.schedule import ScheduleConfig

        algo = AlgoConfig(kl=KLConfig(where="loss", estimator="support_exact", coef=1.0))
        backend = toolbox.backend(model_dir, rank, world, port, algo=algo, **parallel)
        rows = BatchLayout("thd", context_parallel=parallel.get("cp", 1), use_support=True)
        schedule = ScheduleConfig(layout=rows, data_parallel=parallel.get("dp", 1))
        samples = masked_samples(toolbox)
        for sample in samples:
            sample.reward = 0.0  # no advantage: the KL is all of the loss
        # Scoring every sample on one data-parallel index keeps this body free of a gather.
        scoring = prepare_scoring(samples, ScheduleConfig(layout=BatchLayout("thd", use_support=True)))
        scores = gather_scores(
            scoring, [backend.score(scoring.for_rank(0), model="reference", output="support")], len(samples)
        )
        for sample, values in zip(samples, scores, strict=True):
            tilted = values + 0.3 * np.cos(np.arange(len(values)))
            offsets = sample.sampling_mask.offsets
            mass = np.log(np.add.reduceat(np.exp(tilted), offsets[:-1]))
            sample.sampling_mask = sample.sampling_mask.with_ref_log_probs(tilted - np.repeat(mass, np.diff(offsets)))
        batch = prepare_steps(samples, algo, schedule).steps[0]
        metrics = backend.step(batch.for_rank(backend.parallel_layout.dp_rank))
        return scores, [sample.sampling_mask.ref_log_probs for sample in samples], metrics

    return body


@pytest.fixture(scope="module")
def exact_kl_reference(ranks, toolbox, model_dir):
    return ranks(exact_kl(toolbox, model_dir), 1)[0]


@pytest.mark.parametrize("parallel", EXACT_MESHES, ids=str)
def test_exact_kl_is_the_enumerated_kl_under_every_mesh(parallel, ranks, toolbox, model_dir, exact_kl_reference):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    scores, tilted, metrics = ranks(exact_kl(toolbox, model_dir, **parallel), math.prod(parallel.values()))[0]
    samples, per_rollout = masked_samples(toolbox), []
    for sample, ours, reference in zip(samples, scores, tilted, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens)[None]).logits[0].double()
        mask, kl = sample.sampling_mask, []
        for at in range(sample.response_length):
            part = slice(mask.offsets[at], mask.offsets[at + 1])
            log_p = logits[sample.prompt_length + at - 1][mask.ids[part].tolist()].log_softmax(0).numpy()
            np.testing.assert_allclose(ours[part], log_p, atol=2e-5)
            kl.append(float((np.exp(log_p) * (log_p - reference[part])).sum()))
        per_rollout.append(np.mean(kl))
    assert metrics["train/kl_loss"] == pytest.approx(np.mean(per_rollout), rel=1e-4)
    assert metrics["train/kl_loss"] > 0.01
    for name in ("train/loss", "train/kl", "train/grad_norm"):
        assert metrics[name] == pytest.approx(exact_kl_reference[2][name], rel=1e-4)


@pytest.mark.parametrize("parallel", [{}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("cut", ["one", "all"])
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_samples_without_a_response_are_scored_and_not_trained(layout, cut, parallel, ranks, toolbox, model_dir):
    """A prompt at the context limit gets no response: every pass takes such samples, no denominator counts them."""

    def body(rank, world, port):
        from miles.algos.config import AlgoConfig, KLConfig
        from miles.algos.step_batches import gather_scores, prepare_scoring, prepare_steps
        from miles.data.batch_layout import BatchLayout
        from miles.data.sample import Status
        from miles.data.schedule import ScheduleConfig

        algo = AlgoConfig(advantage="gae", kl=KLConfig(where="loss", estimator="support_exact", coef=0.1))
        backend = toolbox.backend(model_dir, rank, world, port, algo=algo, **parallel)
        samples = masked_samples(toolbox)
        for sample in samples if cut == "all" else samples[2:3]:
            sample.tokens, sample.status = sample.tokens[: sample.prompt_length], Status.TRUNCATED
            sample.loss_mask, sample.sampling_mask = sample.loss_mask[:0], None
        rows = BatchLayout(layout, context_parallel=parallel.get("cp", 1), use_support=True)
        schedule = ScheduleConfig(layout=rows, max_tokens_per_gpu=16)
        scoring = prepare_scoring(samples, schedule)
        scores = [
            gather_scores(scoring, [backend.score(scoring.for_rank(0), model=model, output=output)], len(samples))
            for model, output in (("policy", "log_probs"), ("critic", "values"), ("reference", "support"))
        ]
        for sample, log_probs, values, reference in zip(samples, *scores, strict=True):
            assert len(log_probs) == len(values) == sample.response_length
            sample.values = values
            if sample.sampling_mask is not None:
                sample.sampling_mask = sample.sampling_mask.with_ref_log_probs(reference)
        return backend.step(prepare_steps(samples, algo, schedule).steps[0].for_rank(0))

    for metrics in ranks(body, math.prod(parallel.values())):
        assert metrics["train/step_skipped"] == float(cut == "all")
        assert cut == "all" or (np.isfinite(list(metrics.values())).all() and metrics["train/grad_norm"] > 0)

"""A teacher scores the policy's answers; one that cannot is refused before anything is built."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from miles.algos.config import AlgoConfig


@pytest.fixture(scope="module")
def teacher_dir(tokenizer_dir, tmp_path_factory):
    """A mixture of experts with the policy's tokenizer: a teacher may be of another family and size."""
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    shape = ModelShape(
        num_layers=2,
        hidden_size=32,
        head_dim=8,
        init_std=0.3,
        num_experts=4,
        experts_per_token=2,
        expert_ffn_hidden_size=16,
    )
    folder = tmp_path_factory.mktemp("teacher") / "moe"
    return create_checkpoint(folder, family="qwen3_moe", shape=shape, tokenizer_dir=tokenizer_dir, seed=11)


@pytest.fixture(scope="module")
def expected(teacher_dir, toolbox):
    """Log-probs of the samples' responses by transformers' model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(teacher_dir, dtype=torch.float32, attn_implementation="eager")
    scores = []
    for sample in toolbox.samples(ragged=True):
        tokens = torch.from_numpy(sample.tokens)
        with torch.no_grad():
            log_p = model(tokens[None]).logits[0].log_softmax(-1)
        at = torch.arange(sample.prompt_length, len(tokens))
        scores.append(log_p[at - 1, tokens[at]].numpy())
    return scores


@pytest.mark.parametrize("parallel", [{}, {"tp": 2, "sp": True}, {"pp": 2}], ids=str)
def test_teacher_scores_equal_transformers_and_pull_the_policy(
    parallel, ranks, toolbox, model_dir, teacher_dir, expected, tmp_path
):
    algo = AlgoConfig(opd_coef=1.0, teacher=str(teacher_dir))

    def body(rank, world, port):
        backend = toolbox.backend(model_dir, rank, world, port, algo=algo, lr=3e-3, **parallel)
        samples = toolbox.samples(ragged=True)
        for sample in samples:
            sample.reward = 0.0  # no advantage: the teacher's pull is all of the loss
        batch = toolbox.batch(samples, multiple=2).for_rank(0)
        order = [int(index) for item in batch.micro_batches for index in item.sample_index]
        for index, scores in zip(order, backend.score(batch, model="teacher", output="log_probs"), strict=True):
            samples[index].teacher_log_probs = scores
        filled = toolbox.batch(samples, multiple=2).for_rank(0)
        first = backend.step(filled)
        backend.save(tmp_path, extra={"step": 1})
        backend.load_checkpoint(tmp_path)
        again = np.concatenate(backend.score(batch, model="teacher", output="log_probs"))
        return [s.teacher_log_probs for s in samples], first, again, order

    scores, metrics, again, order = ranks(body, 2 if parallel else 1)[0]
    for found, wanted in zip(scores, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=5e-5)
    np.testing.assert_array_equal(again, np.concatenate([scores[i] for i in order]))
    assert metrics["train/grad_norm"] > 1e-3
    assert np.isfinite(metrics["train/teacher_kl"])


def test_a_teacher_that_is_not_asked_for_is_named(ranks, toolbox, model_dir):
    from miles.train.errors import TrainError

    def body(rank, world, port):
        toolbox.backend(model_dir, rank, world, port).score(
            toolbox.batch(toolbox.samples()).for_rank(0), model="teacher", output="log_probs"
        )

    with pytest.raises(TrainError, match=r"no teacher model: it is kept only when algo\.opd_coef"):
        ranks(body, 1)


def other_size(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))


def other_order(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(reversed(vocab), vocab.values(), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_size, "vocabulary of 99 tokens, the policy one of 15"),
        (other_order, r"tokenizer\.json: algo\.teacher numbers its tokens otherwise"),
        (shutil.rmtree, "model folder does not exist"),
        (None, r"algo\.teacher is not set"),
    ],
    ids=["another size", "another order", "no folder", "no teacher"],
)
def test_a_teacher_that_cannot_score_the_policys_tokens_is_refused(
    change, message, ranks, toolbox, model_dir, teacher_dir, tmp_path
):
    from miles.config import ConfigError

    folder = tmp_path / "teacher"
    shutil.copytree(teacher_dir, folder)
    if change is not None:
        change(folder)
    algo = AlgoConfig(opd_coef=1.0, teacher=None if change is None else str(folder))
    with pytest.raises(ConfigError, match=message):
        toolbox.backend(model_dir, 0, 1, 1, algo=algo)


def test_a_teacher_that_the_mesh_does_not_divide_is_refused_by_name(ranks, toolbox, model_dir, teacher_dir):
    from miles.train.errors import ParallelismError

    algo = AlgoConfig(opd_coef=1.0, teacher=str(teacher_dir))
    with pytest.raises(ParallelismError, match=r"algo\.teacher .*moe: train\.parallel\.sp=false"):
        toolbox.backend(model_dir, 0, 2, 1, algo=algo, tp=2)

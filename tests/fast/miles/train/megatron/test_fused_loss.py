"""The trainer's two ways from logits to loss: one fused visit of each row, or log-probs first."""

from __future__ import annotations

import numpy as np
import pytest


def curve(ranks, toolbox, model_dir, fused, *, steps=3, samples=None, algo=None, **options):
    """(metrics of each step, log-probs after the last) of rank 0."""
    world = options.get("pp", 1) * options.get("cp", 1) * options.get("tp", 1)

    def body(rank, world, port):
        backend = toolbox.backend(model_dir, rank, world, port, algo=algo, fused_loss=fused, **options)
        given = toolbox.samples(**(samples or {"ragged": True, "off_policy": True}))
        batch = toolbox.batch(given, algo=algo, layout="thd", tokens=64).for_rank(0)
        rows = [backend.step(batch) for _ in range(steps)]
        return rows, np.concatenate(backend.score(batch, model="policy", output="log_probs"))

    return ranks(body, world)[0]


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("loss", ["ppo_clip", "dual_clip", "cispo"])
def test_fused_steps_equal_unfused_steps_under_every_mesh(loss, parallel, ranks, toolbox, model_dir):
    from miles.algos.config import AlgoConfig

    algo = AlgoConfig(loss=loss, dual_clip_c=1.5 if loss == "dual_clip" else None)
    expected, plain = curve(ranks, toolbox, model_dir, "off", algo=algo, **parallel)
    found, fused = curve(ranks, toolbox, model_dir, "on", algo=algo, **parallel)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=2e-3, abs=1e-4), key
    assert expected[0]["train/grad_norm"] > 1e-3
    np.testing.assert_allclose(fused, plain, atol=2e-3)


@pytest.mark.parametrize("share", [True, False])
def test_rows_of_a_shared_prompt_give_the_sum_of_their_gradients(share, ranks, toolbox, model_dir):
    samples = {"grouped": True, "ragged": True}
    options = {"samples": samples, "share_prompts": share, "steps": 1}
    expected, plain = curve(ranks, toolbox, model_dir, "off", **options)
    found, fused = curve(ranks, toolbox, model_dir, "on", **options)
    for key in ("train/loss", "train/grad_norm", "train/entropy"):
        assert found[0][key] == pytest.approx(expected[0][key], rel=1e-4, abs=1e-6), key
    np.testing.assert_allclose(fused, plain, atol=1e-3)


def test_on_a_cpu_auto_is_the_unfused_way_bit_for_bit(ranks, toolbox, model_dir):
    expected, plain = curve(ranks, toolbox, model_dir, "off")
    found, auto = curve(ranks, toolbox, model_dir, "auto")
    assert found == expected
    assert np.array_equal(auto, plain)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"loss": "gspo"}, "loss gspo has no kernel"), ({"entropy_coef": 0.1}, "an entropy bonus is part of the loss")],
)
def test_on_is_refused_with_the_reason_where_it_cannot_be(options, reason, ranks, toolbox, model_dir):
    from miles.algos.config import AlgoConfig
    from miles.train.errors import TrainError

    with pytest.raises(TrainError, match=rf"train\.fused_loss is on but {reason}.*; use train\.fused_loss=auto"):
        curve(ranks, toolbox, model_dir, "on", algo=AlgoConfig(**options))


@pytest.mark.parametrize(
    ("mode", "on_gpu", "reason", "fused"),
    [
        ("auto", True, None, True),
        ("auto", False, None, False),
        ("auto", True, "a reason", False),
        ("off", True, None, False),
        ("on", False, None, True),
        ("on", True, None, True),
    ],
)
def test_which_way_is_taken(mode, on_gpu, reason, fused):
    from miles.train.megatron.policy_objective import choose_fused

    assert choose_fused(mode, on_gpu=on_gpu, reason=reason) is fused


def test_split_logits_are_not_fused(ranks, toolbox, model_dir):
    from miles.train.errors import TrainError

    with pytest.raises(TrainError, match="logits are split over tensor-parallel ranks"):
        curve(ranks, toolbox, model_dir, "on", tp=2)

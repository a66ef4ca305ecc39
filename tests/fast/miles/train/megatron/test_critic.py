"""The critic: values per token, a value loss that learns, one checkpoint with the policy, equal under every mesh."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="module")
def algo(ranks):
    from miles.algos.config import AlgoConfig, ValueConfig

    return AlgoConfig(advantage="gae", value=ValueConfig(lr=5e-3))


def ppo(toolbox, model_dir, algo, steps, folder=None, **parallel):
    """Body of a rank: `steps` PPO steps, values scored before each; then a checkpoint."""

    def body(rank, world, port):
        from miles.algos.step_batches import gather_scores, prepare_scoring, prepare_steps
        from miles.data.batch_layout import BatchLayout
        from miles.data.schedule import ScheduleConfig

        backend = toolbox.backend(model_dir, rank, world, port, algo=algo, **parallel)
        multiple = parallel["tp"] if parallel.get("sp") else 1
        rows = BatchLayout("bshd", pad_multiple=multiple, context_parallel=parallel.get("cp", 1))
        schedule = ScheduleConfig(layout=rows)
        samples = toolbox.samples(ragged=True)
        curve = []
        for _ in range(steps):
            scoring = prepare_scoring(samples, schedule)
            values = gather_scores(
                scoring, [backend.score(scoring.for_rank(0), model="critic", output="values")], len(samples)
            )
            for sample, value in zip(samples, values, strict=True):
                sample.values = value
            batch = prepare_steps(samples, algo, schedule).steps[0]
            curve.append(backend.step(batch.for_rank(0)))
        if folder is not None:
            backend.save(folder, extra={"step": steps})
            reloaded = backend.load_checkpoint(folder)
            assert reloaded is not None
            again = backend.score(prepare_scoring(samples, schedule).for_rank(0), model="critic", output="values")
            return curve, values, again
        return curve, values

    return body


def test_values_start_at_zero_and_the_value_loss_falls(ranks, toolbox, model_dir, algo):
    curve, _ = ranks(ppo(toolbox, model_dir, algo, 12), 1)[0]
    losses = [metrics["train/value_loss"] for metrics in curve]
    assert losses[-1] < 0.5 * losses[0]
    assert all(metrics["train/value_grad_norm"] > 0 for metrics in curve)
    first, _ = ranks(ppo(toolbox, model_dir, algo, 1), 1)[0]
    assert first[0]["train/value_loss"] == pytest.approx(losses[0])


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}], ids=str)
def test_critic_is_equal_under_every_mesh(parallel, ranks, toolbox, model_dir, algo):
    expected = ranks(ppo(toolbox, model_dir, algo, 3), 1)[0]
    results = ranks(ppo(toolbox, model_dir, algo, 3, **parallel), 2)
    for got in results:
        for mine, theirs in zip(got[0], expected[0], strict=True):
            for key in ("train/value_loss", "train/value_grad_norm", "train/grad_norm"):
                assert mine[key] == pytest.approx(theirs[key], rel=1e-4), key
        np.testing.assert_allclose(np.concatenate(got[1]), np.concatenate(expected[1]), rtol=1e-3, atol=1e-5)


def test_critic_travels_in_the_checkpoint(ranks, toolbox, model_dir, algo, tmp_path):
    from miles.train.errors import CheckpointError

    _, before, after = ranks(ppo(toolbox, model_dir, algo, 2, tmp_path), 1)[0]
    assert not np.allclose(np.concatenate(before), np.concatenate(after)), "the last step moved the critic"

    def without_critic(rank, world, port):
        toolbox.backend(model_dir, rank, world, port).load_checkpoint(tmp_path)

    with pytest.raises(CheckpointError, match=r"holds critic, policy, but this run trains policy"):
        ranks(without_critic, 1)


def test_values_without_a_critic_are_refused(ranks, toolbox, model_dir):
    from miles.train.errors import TrainError

    def body(rank, world, port):
        backend = toolbox.backend(model_dir, rank, world, port)
        backend.score(toolbox.batch(toolbox.samples()).for_rank(0), model="critic", output="values")

    with pytest.raises(TrainError, match=r"there is no critic.*algo\.advantage=gae"):
        ranks(body, 1)

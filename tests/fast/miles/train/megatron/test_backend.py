"""The backend's edges: skipped and broken steps, lost ranks, bf16, hooks, recompute, several steps of learning."""

from __future__ import annotations

import os
import time

import pytest


def one(toolbox, model_dir, act, **options):
    """Body of a single rank: `act(backend)`."""
    return lambda rank, world, port: act(toolbox.backend(model_dir, rank, world, port, **options))


def test_the_megatron_backend_is_a_backend(ranks):
    from miles.train.backend import Backend
    from miles.train.megatron.backend import MegatronBackend

    missing = [name for name in dir(Backend) if not name.startswith("_") and not hasattr(MegatronBackend, name)]
    assert missing == []


def test_a_batch_without_counted_rollouts_changes_nothing(ranks, toolbox, model_dir):
    def act(backend):
        import torch

        samples = toolbox.samples()
        for sample in samples:
            sample.removed = True
        before = {name: tensor.clone() for name, tensor in backend.state_for_sync()}
        metrics = backend.step(toolbox.batch(samples).for_rank(0))
        assert all(torch.equal(before[name], tensor) for name, tensor in backend.state_for_sync())
        return metrics, backend.policy.optimizer.steps

    metrics, steps = ranks(one(toolbox, model_dir, act), 1)[0]
    assert metrics == {"train/step_skipped": 1.0}
    assert steps == 0, "no optimizer step and no step of the learning rate"


@pytest.mark.parametrize("nonfinite", ["raise", "skip_step"])
def test_a_gradient_that_is_not_finite(nonfinite, ranks, toolbox, model_dir):
    from miles.algos.config import AlgoConfig
    from miles.config import MilesError

    def act(backend):
        batch = toolbox.batch(toolbox.samples()).for_rank(0)
        with_nan = next(iter(backend.policy.chunks[0].model.parameters()))
        with_nan.data[0, 0] = float("nan")
        return backend.step(batch), backend.policy.optimizer.steps

    body = one(toolbox, model_dir, act, algo=AlgoConfig(nonfinite=nonfinite))
    if nonfinite == "raise":
        with pytest.raises(MilesError, match=r"lower the learning rate|not finite"):
            ranks(body, 1)
        return
    metrics, steps = ranks(body, 1)[0]
    assert metrics["train/step_skipped"] == 1.0
    assert steps == 0


@pytest.mark.parametrize("nonfinite", ["raise", "skip_step"])
def test_one_token_that_is_not_finite_skips_the_step_though_its_gradient_is(nonfinite, ranks, toolbox, model_dir):
    from miles.algos.config import AlgoConfig
    from miles.algos.objective import NonFiniteError

    def act(backend):
        import numpy as np
        import torch

        samples = toolbox.samples(off_policy=True)
        at = int(np.flatnonzero(samples[3].loss_mask)[0])
        samples[3].old_log_probs[at] = np.nan
        before = {name: tensor.clone() for name, tensor in backend.state_for_sync()}
        metrics = backend.step(toolbox.batch(samples).for_rank(0))
        assert all(torch.equal(before[name], tensor) for name, tensor in backend.state_for_sync())
        return metrics, backend.policy.optimizer.steps, samples[3].sample_id

    body = one(toolbox, model_dir, act, algo=AlgoConfig(nonfinite=nonfinite))
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError, match=r"sample 's3', response index \d+: .*old log-prob nan"):
            ranks(body, 1)
        return
    metrics, steps, _ = ranks(body, 1)[0]
    assert (metrics["train/step_skipped"], metrics["train/nonfinite_tokens"], steps) == (1.0, 1.0, 0)
    assert metrics["train/grad_norm"] < float("inf")
    assert "train/lr" not in metrics


@pytest.mark.parametrize("label", ["policy", "critic"])
@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
@pytest.mark.parametrize("nonfinite", ["raise", "skip_step"])
def test_a_norm_that_is_not_finite_stops_policy_and_critic_alike(label, norm, nonfinite, ranks, toolbox, model_dir):
    from miles.algos.config import AlgoConfig
    from miles.train.errors import TrainError

    def act(backend):
        import numpy as np
        import torch

        samples = toolbox.samples()
        for sample in samples:
            sample.values = np.zeros(sample.response_length, dtype=np.float32)
        batch = toolbox.batch(samples, algo=backend.algo).for_rank(0)
        trained = backend.models[label]
        gradient = trained.gradient
        trained.gradient = lambda *arguments: (gradient(*arguments)[0], norm)
        before = [item.weight.clone() for model in backend.models.values() for item in model.optimizer.masters]
        metrics = backend.step(batch)
        after = [item.weight for model in backend.models.values() for item in model.optimizer.masters]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return metrics, [model.optimizer.steps for model in backend.models.values()]

    body = one(toolbox, model_dir, act, algo=AlgoConfig(advantage="gae", nonfinite=nonfinite))
    if nonfinite == "raise":
        with pytest.raises(TrainError, match=r"the gradient of step 0 is not finite .*algo\.nonfinite=skip_step"):
            ranks(body, 1)
        return
    metrics, steps = ranks(body, 1)[0]
    assert metrics["train/step_skipped"] == 1.0
    assert steps == [0, 0]
    assert "train/nonfinite_tokens" not in metrics


def test_both_models_step_once_with_their_own_norm_and_rate(ranks, toolbox, model_dir):
    from miles.algos.config import AlgoConfig, ValueConfig

    def act(backend):
        import numpy as np

        samples = toolbox.samples()
        for sample in samples:
            sample.values = np.zeros(sample.response_length, dtype=np.float32)
        given = {}
        for label, model in backend.models.items():
            apply = model.optimizer.apply
            model.optimizer.apply = lambda norm, label=label, apply=apply: given.setdefault(label, (norm, apply(norm)))[
                1
            ]
        metrics = backend.step(toolbox.batch(samples, algo=backend.algo).for_rank(0))
        return metrics, given

    algo = AlgoConfig(advantage="gae", value=ValueConfig(lr=0.125))
    metrics, given = ranks(one(toolbox, model_dir, act, algo=algo), 1)[0]
    assert given["policy"] == (metrics["train/grad_norm"], metrics["train/lr"])
    assert given["critic"] == (metrics["train/value_grad_norm"], 0.125)
    assert metrics["train/grad_norm"] != metrics["train/value_grad_norm"]


def test_a_lost_rank_ends_the_step_on_the_others(ranks, toolbox, model_dir):
    def body(rank, world, port):
        from miles.train.errors import TrainError

        backend = toolbox.backend(model_dir, rank, world, port, tp=2)
        batch = toolbox.batch(toolbox.samples()).for_rank(0)
        backend.step(batch)
        if rank == 1:
            return "about to die"
        time.sleep(0.5)
        start = time.monotonic()
        with pytest.raises(TrainError, match="another rank died or did not answer"):
            backend.step(batch)
        return time.monotonic() - start

    assert ranks(body, 2)[0] < 30


def test_bf16_trains_on_fp32_masters(ranks, toolbox, model_dir, tmp_path):
    def body(rank, world, port):
        import torch
        from safetensors.torch import load_file

        from miles.algos.config import AlgoConfig
        from miles.train.config import OptimizerConfig, TrainConfig
        from miles.train.megatron.backend import MegatronBackend

        backend = MegatronBackend(
            config=TrainConfig(precision="bf16", optimizer=OptimizerConfig(lr=1e-5)),
            algo=AlgoConfig(),
            model_dir=model_dir,
            rank=0,
            world_size=1,
            device="cpu",
            master_addr="127.0.0.1",
            master_port=0,
            seed=0,
        )
        backend.init()
        backend.load()
        start = load_file(model_dir / "model.safetensors")
        held = dict(backend.policy.full_masters())
        assert held.keys() == start.keys()
        for key, tensor in held.items():
            assert torch.equal(tensor, start[key].bfloat16().float()), f"the master of {key} is what was loaded"
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        before = backend.policy.optimizer.master_tensors()[name].clone()
        metrics = backend.step(toolbox.batch(toolbox.samples(off_policy=True)).for_rank(0))
        after = backend.policy.optimizer.master_tensors()[name]
        assert after.dtype == torch.float32
        assert (after - before).abs().max() < 1e-4, "a step of lr 1e-5 from what was loaded"
        assert not torch.equal(before, after), "a step below bf16's resolution still counts"
        backend.export_hf(tmp_path / "out")
        exported = load_file(tmp_path / "out/model.safetensors")
        assert all(tensor.dtype == torch.float32 for tensor in exported.values()), "config.json says float32"
        sent = dict(backend.state_for_sync())
        assert all(tensor.dtype == torch.bfloat16 for tensor in sent.values())
        return metrics

    metrics = ranks(body, 1)[0]
    assert 0 < metrics["train/grad_norm"] < 100


def test_install_hook_sees_every_chunk_before_gradient_buffers_exist(ranks, toolbox, model_dir):
    def body(rank, world, port):
        from miles.algos.config import AlgoConfig
        from miles.train.config import TrainConfig
        from miles.train.megatron.backend import MegatronBackend

        seen = []

        def install(model, hf_names):
            seen.append(all(not hasattr(parameter, "main_grad") for parameter in model.parameters()))

        arguments = {
            "rank": 0,
            "world_size": 1,
            "device": "cpu",
            "master_addr": "127.0.0.1",
            "master_port": 0,
            "seed": 0,
        }
        MegatronBackend(
            config=TrainConfig(), algo=AlgoConfig(), model_dir=model_dir, install=install, **arguments
        ).init()
        return seen

    assert ranks(body, 1)[0] == [True]


def test_policy_gradient_moves_probability_to_the_rewarded_tokens(ranks, toolbox, model_dir):
    def act(backend):
        import numpy as np

        samples = toolbox.samples()
        for sample in samples:
            sample.reward = float((sample.tokens[sample.prompt_length :] < 7).mean())
        batch = toolbox.batch(samples).for_rank(0)

        def gap():
            scores = [s.sum() for s in backend.score(batch, model="policy", output="log_probs")]
            rewards = [samples[i].reward for mb in batch.micro_batches for i in mb.sample_index]
            return float(np.corrcoef(scores, rewards)[0, 1])

        before = gap()
        for _ in range(20):
            backend.step(batch)
        return before, gap()

    before, after = ranks(one(toolbox, model_dir, act, lr=3e-3), 1)[0]
    assert after > before + 0.2


def test_wrong_number_of_processes_is_named(ranks, toolbox, model_dir):
    from miles.train.errors import ParallelismError

    with pytest.raises(ParallelismError, match=r"tp\*pp\*cp\*dp = 2\*1\*1\*1 = 2 but 1 processes were started"):
        ranks(one(toolbox, model_dir, lambda backend: None, tp=2), 1)


def test_nobody_listening_is_a_bounded_error(ranks, toolbox, model_dir):
    def body(rank, world, port):
        from miles.algos.config import AlgoConfig
        from miles.train.config import ParallelConfig, TrainConfig
        from miles.train.megatron.backend import MegatronBackend

        MegatronBackend(
            config=TrainConfig(parallel=ParallelConfig(tp=2), timeout_s=1.0),
            algo=AlgoConfig(),
            model_dir=model_dir,
            rank=1,
            world_size=2,
            device="cpu",
            master_addr="127.0.0.1",
            master_port=1,
            seed=0,
        ).init()

    from miles.train.errors import TrainError

    with pytest.raises(TrainError, match=r"rank 1 could not join 127\.0\.0\.1:1 within 1 s"):
        ranks(body, 1)


def test_the_cpu_shim_names_its_symbols_and_refuses_another_version(ranks, monkeypatch):
    from miles.train.errors import PlatformError
    from miles.train.megatron import platform

    monkeypatch.setattr(platform, "megatron_version", lambda: "0.15.0")
    with pytest.raises(PlatformError, match=r"verified for megatron-core 0\.16\.1, 0\.19\.2, installed is 0\.15\.0"):
        platform.apply_cpu_shim()
    monkeypatch.undo()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(PlatformError, match="CUDA is already in use"):
        platform.apply_cpu_shim()


def test_the_cpu_shim_replaces_what_it_lists_and_nothing_else(ranks):
    def body(rank, world, port):
        import torch

        from miles.train.megatron import platform

        names = [(torch.cuda, name) for name in dir(torch.cuda)] + [(torch, name) for name in dir(torch)]
        names += [(torch.Tensor, name) for name in dir(torch.Tensor)]
        before = {(owner.__name__, name): getattr(owner, name, None) for owner, name in names}
        listed = {symbol.name for symbol in platform.apply_cpu_shim()}
        assert platform.apply_cpu_shim(), "applying twice is harmless"
        changed = {
            f"{owner.__name__}.{name}"
            for owner, name in names
            if getattr(owner, name, None) is not before[(owner.__name__, name)] and not name.startswith("__")
        }
        return changed, listed

    changed, listed = ranks(body, 1)[0]
    assert changed == {"torch.cuda.current_device", "torch.cuda.synchronize"}
    assert changed <= listed


def test_transformer_engine_is_refused_by_name(ranks):
    import torch

    from miles.train.config import MegatronConfig
    from miles.train.errors import PlatformError
    from miles.train.megatron.platform import Platform
    from miles.train.megatron.spec import choose_spec

    with pytest.raises(PlatformError, match=r"train\.megatron\.spec is te but Transformer Engine is not usable"):
        choose_spec(MegatronConfig(spec="te"), Platform(torch.device("cpu"), "gloo"))


def test_a_model_whose_frequencies_differ_from_the_checkpoint_is_refused(ranks, toolbox, model_dir):
    from miles.models.errors import ModelError

    def act(backend):
        from dataclasses import replace

        from miles.train.megatron.rotary import check_inv_freq

        check_inv_freq(backend.policy.chunks[0].model, replace(backend.model.rope, theta=5e5))

    with pytest.raises(ModelError, match=r"rotary frequencies .* differ from the checkpoint's"):
        ranks(one(toolbox, model_dir, act), 1)


def test_full_disk_during_save_is_one_error_on_all_ranks(ranks, toolbox, model_dir, tmp_path):
    def body(rank, world, port):
        import errno

        from miles.train.errors import CheckpointError

        backend = toolbox.backend(model_dir, rank, world, port, tp=2)
        if rank == 1:
            original = os.fsync

            def full(descriptor):
                raise OSError(errno.ENOSPC, "No space left on device")

            os.fsync = full
        with pytest.raises(CheckpointError, match="the disk is full"):
            backend.save(tmp_path, extra={"step": 1})
        if rank == 1:
            os.fsync = original
        backend.save(tmp_path, extra={"step": 2})

    ranks(body, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_2", "latest"]


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}, {"tp": 2}], ids=["single", "pp2", "tp2"])
def test_the_reference_stays_where_the_run_started(parallel, ranks, toolbox, model_dir, tmp_path):
    import numpy as np

    from miles.algos.config import AlgoConfig, KLConfig

    algo = AlgoConfig(kl=KLConfig(where="loss", estimator="k2", coef=0.1))

    def body(rank, world, port):
        backend = toolbox.backend(model_dir, rank, world, port, algo=algo, **parallel)
        samples = toolbox.samples(ragged=True)
        batch = toolbox.batch(samples).for_rank(0)
        start = np.concatenate(backend.score(batch, model="reference", output="log_probs"))
        assert np.array_equal(start, np.concatenate(backend.score(batch, model="policy", output="log_probs")))
        order = [int(index) for item in batch.micro_batches for index in item.sample_index]
        for index, scores in zip(order, backend.score(batch, model="reference", output="log_probs"), strict=True):
            samples[index].ref_log_probs = scores + 1.0
        metrics = backend.step(toolbox.batch(samples).for_rank(0))
        backend.save(tmp_path, extra={"step": 1})
        backend.load_checkpoint(tmp_path)
        moved = np.abs(np.concatenate(backend.score(batch, model="policy", output="log_probs")) - start).max()
        return (
            metrics,
            moved,
            np.abs(np.concatenate(backend.score(batch, model="reference", output="log_probs")) - start).max(),
        )

    metrics, moved, drift = ranks(body, 2 if parallel else 1)[0]
    assert metrics["train/kl"] == pytest.approx(0.5, rel=1e-4), "k2 of a difference of 1"
    assert moved > 1e-4
    assert drift == 0.0


def test_no_reference_is_kept_when_nothing_needs_it(ranks, toolbox, model_dir):
    from miles.train.errors import TrainError

    def act(backend):
        backend.score(toolbox.batch(toolbox.samples()).for_rank(0), model="reference", output="log_probs")

    with pytest.raises(TrainError, match=r"no reference model.*algo\.kl\.where"):
        ranks(one(toolbox, model_dir, act), 1)


def test_a_token_outside_the_vocabulary_is_named(ranks, toolbox, model_dir):
    from miles.train.errors import TrainError

    def act(backend):
        backend.step(toolbox.batch(toolbox.samples(vocab=40)).for_rank(0))

    with pytest.raises(TrainError, match=r"holds token id \d+, but the model's vocabulary has 15 tokens"):
        ranks(one(toolbox, model_dir, act), 1)

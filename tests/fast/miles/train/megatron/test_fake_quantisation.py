"""Fake quantisation installed through the backend's hook: every expert runs it, gradients pass, masters stay exact."""

from __future__ import annotations

import pytest


def quantised(toolbox, moe_dir, act, *, recompute=None, nvfp4=None, **parallel):
    """Body of a rank: a backend with NVFP4 fake quantisation on its experts; `act(backend, hook, batch)`."""

    def body(rank, world, port):
        from miles.quant.config import QuantConfig
        from miles.quant.hook import FakeQATHook

        holder = []
        hook = FakeQATHook(
            QuantConfig(fake_qat="nvfp4", nvfp4=nvfp4),
            environ={},
            group=lambda: holder[0].mesh.expert_tp if holder else None,
            model_dir=moe_dir,
        )
        backend = toolbox.backend(
            moe_dir, rank, world, port, install=hook, announce=holder.append, recompute=recompute, **parallel
        )
        multiple = parallel["tp"] if parallel.get("sp") else 1
        samples = toolbox.samples(ragged=True, response=6, off_policy=True)
        batch = toolbox.batch(samples, dp=parallel.get("dp", 1), multiple=multiple, tokens=80)
        return act(backend, hook, batch.for_rank(backend.parallel_layout.dp_rank))

    return body


def train(backend, hook, batch):
    from miles.quant import qat

    before = {name: tensor.clone() for name, tensor in backend.policy.optimizer.master_tensors().items()}
    metrics = backend.step(batch)
    calls = qat.calls(hook.chunks[0])
    qat.assert_called(hook.chunks[0], len(batch.micro_batches))
    moved = [name for name, old in before.items() if not old.equal(backend.policy.optimizer.master_tensors()[name])]
    return metrics, calls, moved


def test_every_expert_runs_the_hook_and_still_learns(ranks, toolbox, moe_dir):
    metrics, calls, moved = ranks(quantised(toolbox, moe_dir, train), 1)[0]
    assert len(calls) == 2 * 4 * 2, "2 layers, 4 experts, 2 linears"
    assert all(name in moved for name in (f"{call}.weight" for call in calls))
    assert metrics["train/grad_norm"] > 0


def take_off(hook):
    """Give every wrapped module its own forward back."""
    for module in hook.chunks[0].modules():
        module.__dict__.pop("forward", None)


def test_quantisation_changes_the_forward_pass(ranks, toolbox, moe_dir):
    import numpy as np

    def scores(backend, hook, batch):
        with_hook = np.concatenate(backend.score(batch, model="policy", output="log_probs"))
        take_off(hook)
        return with_hook, np.concatenate(backend.score(batch, model="policy", output="log_probs"))

    with_hook, without = ranks(quantised(toolbox, moe_dir, scores), 1)[0]
    assert 1e-3 < np.abs(with_hook - without).max() < 5


def test_rounding_adds_no_gap_between_trainer_and_engine(ranks, toolbox, moe_dir, tmp_path):
    """Log-probs of the fake-quantised trainer and of a plain trainer with the engine's decoded weights: equal bits.

    Trainer and engine have one arithmetic (decision 0403), so nothing else remains. An engine that chooses by another
    error is far off.
    """

    def scores(backend, hook, batch):
        import numpy as np
        import torch
        from safetensors.torch import save_file

        from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
        from miles.quant.packed import PackedExperts

        with_hook = np.concatenate(backend.score(batch, model="policy", output="log_probs"))
        sent = {name: tensor.detach().clone() for name, tensor in backend.state_for_sync()}
        take_off(hook)
        found = []
        for rounding in (hook.rounding, NVFP4QDQConfig(True, error_mode=ErrorMode.MAE)):
            live = {name: tensor.clone() for name, tensor in sent.items()}
            count = PackedExperts(rounding).refresh(live)
            assert count == sum(not torch.equal(live[name], sent[name]) for name in live) == 2 * 4 * 3
            save_file(live, tmp_path / "model.safetensors")
            backend.load(tmp_path)
            found.append(
                np.abs(np.concatenate(backend.score(batch, model="policy", output="log_probs")) - with_hook).max()
            )
        return found

    options = {"use_4over6": True, "error_mode": "MSE", "error_use_fast_math": True}

    def body(rank, world, port):
        from miles.quant.config import NVFP4Options

        return quantised(toolbox, moe_dir, scores, nvfp4=NVFP4Options(**options))(rank, world, port)

    same, other = ranks(body, 1)[0]
    assert same == 0.0
    print(f"gap of another rounding: {other:.2e}")
    assert other > 1e-3


@pytest.mark.parametrize("parallel", [{"dp": 2, "ep": 2}, {"tp": 2, "sp": True}], ids=["ep2", "etp2_shared_maximum"])
def test_quantised_step_is_equal_under_every_mesh(parallel, ranks, toolbox, moe_dir):
    expected = ranks(quantised(toolbox, moe_dir, train), 1)[0][0]
    for metrics, _, _ in ranks(quantised(toolbox, moe_dir, train, **parallel), 2):
        for key in ("train/loss", "train/grad_norm"):
            assert metrics[key] == pytest.approx(expected[key], rel=1e-4), key


def test_recompute_quantises_to_the_same_bits(ranks, toolbox, moe_dir):
    expected = ranks(quantised(toolbox, moe_dir, train), 1)[0][0]
    again, calls, _ = ranks(quantised(toolbox, moe_dir, train, recompute={"granularity": "full"}), 1)[0]
    assert again["train/loss"] == expected["train/loss"]
    assert again["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-6)
    assert min(calls.values()) >= 2, "the second pass of each of two micro-batches; the first has no gradients"


def test_removing_the_hook_stops_the_run(ranks, toolbox, moe_dir):
    from miles.quant.errors import QATHookMissing

    def sabotage(backend, hook, batch):
        from miles.quant import qat

        backend.step(batch)
        qat.assert_called(hook.chunks[0], len(batch.micro_batches))
        victim = hook.chunks[0].get_submodule("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1")
        victim.__dict__.pop("forward")
        backend.step(batch)
        qat.assert_called(hook.chunks[0], len(batch.micro_batches))

    with pytest.raises(QATHookMissing, match=r"local_experts\.1\.linear_fc1"):
        ranks(quantised(toolbox, moe_dir, sabotage), 1)


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}, {"dp": 2, "ep": 2}], ids=["one", "pp2", "ep2"])
def test_ignored_layers_and_experts_are_meant_by_their_hugging_face_names(parallel, ranks, toolbox, moe_dir):
    """Layer 0 stays as it is by its edge, expert 1 by its name, on whichever rank they live."""
    keep = {"ignore": ("re:.*experts\\.1\\..*",), "bf16_first_layers": 1}

    def names(backend, hook, batch):
        from miles.models.weightmap import global_name

        chunk = backend.policy.chunks[0]
        offsets = {"layer_offset": chunk.layer_offset, "expert_offset": chunk.expert_offset}
        return [global_name(name, **offsets) for name in hook.chunks[0]._miles_fake_qat.names]

    def body(rank, world, port):
        from miles.quant.config import NVFP4Options

        return quantised(toolbox, moe_dir, names, nvfp4=NVFP4Options(**keep), **parallel)(rank, world, port)

    found = sorted(name for part in ranks(body, 2 if parallel else 1) for name in part)
    kept = [f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc{n}.weight" for e in (0, 2, 3) for n in (1, 2)]
    assert found == kept


def test_checkpoints_and_exports_carry_the_contract(ranks, toolbox, moe_dir, tmp_path):
    def save(backend, hook, batch):
        backend.step(batch)
        backend.save(tmp_path / "checkpoints", extra={"step": 1})
        backend.export_hf(tmp_path / "hf")

    from miles.quant import contract
    from miles.train import checkpoint
    from miles.train.convert import checkpoint_to_hf, hf_to_checkpoint

    ranks(quantised(toolbox, moe_dir, save), 1)
    exported = contract.read(tmp_path / "hf")
    assert (exported.weights, exported.format, len(exported.tensors)) == ("masters", "nvfp4", 2 * 4 * 3)
    settings = checkpoint.find(tmp_path / "checkpoints").manifest.settings
    assert settings["quantization_contract"] == exported.model_dump(mode="json")
    checkpoint_to_hf(tmp_path / "checkpoints", tmp_path / "converted")
    assert contract.read(tmp_path / "converted") == exported
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "again")
    again = checkpoint.find(tmp_path / "again").manifest.settings
    assert again["quantization_contract"] == settings["quantization_contract"]


def test_a_checkpoint_is_not_resumed_with_another_rounding(ranks, toolbox, moe_dir, tmp_path):
    from miles.quant.config import NVFP4Options
    from miles.quant.errors import ContractMismatch

    def save(backend, hook, batch):
        backend.save(tmp_path, extra={"step": 1})

    def resume(backend, hook, batch):
        return backend.load_checkpoint(tmp_path).step

    ranks(quantised(toolbox, moe_dir, save), 1)
    assert ranks(quantised(toolbox, moe_dir, resume), 1) == [1]
    with pytest.raises(ContractMismatch, match=r"resume from .*iter_1: .*decode: expected 'te', found 'stored'"):
        ranks(quantised(toolbox, moe_dir, resume, nvfp4=NVFP4Options(decode="stored")), 1)

    def plain(rank, world, port):
        return toolbox.backend(moe_dir, rank, world, port).load_checkpoint(tmp_path)

    with pytest.raises(ContractMismatch, match="was trained with fake quantisation, this run is without"):
        ranks(plain, 1)

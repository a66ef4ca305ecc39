"""Checkpoints become Hugging Face folders and back without building a model, bit for bit."""

from __future__ import annotations

import pytest


def equal(left, right):
    import torch
    from safetensors.torch import load_file

    first, second = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", ["dense", "experts"])
def test_hugging_face_to_checkpoint_and_back(family, model_dir, moe_dir, tmp_path):
    from miles.train.convert import checkpoint_to_hf, hf_to_checkpoint

    source = model_dir if family == "dense" else moe_dir
    path = hf_to_checkpoint(source, tmp_path / "run")
    assert path.name == "iter_0"
    out = checkpoint_to_hf(tmp_path / "run", tmp_path / "out", tokenizer_dir=source)
    assert equal(source, out)
    assert (out / "tokenizer.json").exists()


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_trained_checkpoint_of_any_mesh_equals_the_backends_export(parallel, ranks, toolbox, model_dir, tmp_path):
    from miles.train.convert import checkpoint_to_hf

    def body(rank, world, port):
        backend = toolbox.backend(model_dir, rank, world, port, **parallel)
        backend.step(toolbox.batch(toolbox.samples(off_policy=True)).for_rank(0))
        backend.save(tmp_path / "run", extra={"step": 1})
        backend.export_hf(tmp_path / "export")

    ranks(body, 2)
    assert equal(checkpoint_to_hf(tmp_path / "run/iter_1", tmp_path / "out"), tmp_path / "export")


def test_a_converted_folder_starts_a_run_on_any_mesh(ranks, toolbox, model_dir, tmp_path):
    from miles.train.convert import hf_to_checkpoint

    hf_to_checkpoint(model_dir, tmp_path)

    def body(rank, world, port):
        import torch
        from safetensors.torch import load_file

        backend = toolbox.backend(model_dir, rank, world, port, loaded=False, tp=2)
        resumed = backend.load_checkpoint(tmp_path)
        original = load_file(model_dir / "model.safetensors")
        assert all(torch.equal(original[name], tensor) for name, tensor in backend.state_for_sync())
        return resumed.step, backend.policy.optimizer.steps

    assert ranks(body, 2) == [(0, 0), (0, 0)]


def test_a_folder_without_checkpoints_is_named(tmp_path):
    from miles.train.convert import checkpoint_to_hf
    from miles.train.errors import CheckpointError

    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        checkpoint_to_hf(tmp_path, tmp_path / "out")

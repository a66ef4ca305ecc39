"""The built model is the Hugging Face model: logits, round trip, export, created folders."""

from __future__ import annotations

import pytest


def hf_logits(folder, tokens):
    """Logits of transformers' own model in fp32, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(tokens).logits


def our_logits(toolbox, folder, tokens, **parallel):
    def body(rank, world, port):
        import torch
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

        backend = toolbox.backend(folder, rank, world, port, **parallel)
        with torch.no_grad():
            return gather(backend.policy.chunks[0].model(tokens, None, None)).float()

    return body


@pytest.fixture(scope="module")
def tokens():
    import torch

    return torch.randint(0, 15, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def reference(model_dir, tokens):
    return hf_logits(model_dir, tokens)


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"tp": 2, "sp": True}], ids=["tp1", "tp2", "tp2_sp"])
def test_logits_equal_transformers(parallel, ranks, toolbox, model_dir, tokens, reference):
    got = ranks(our_logits(toolbox, model_dir, tokens, **parallel), parallel.get("tp", 1))[0]
    assert (got[..., :15] - reference).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "parallel",
    [{}, {"dp": 2, "ep": 2}, {"tp": 2, "sp": True, "ep": 2, "etp": 1}],
    ids=["ep1", "ep2", "tp2_ep2_etp1"],
)
def test_mixture_of_experts_logits_equal_transformers(parallel, ranks, toolbox, moe_dir, tokens):
    got = ranks(our_logits(toolbox, moe_dir, tokens, **parallel), 2 if parallel else 1)[0]
    assert (got[..., :15] - hf_logits(moe_dir, tokens)).abs().max() <= 1e-5


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_logits_equal_transformers_under_scaled_rope(rope, ranks, toolbox, model_dir, tokens, tmp_path):
    import json
    import shutil

    folder = tmp_path / rope
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": rope, "rope_theta": 100.0, "factor": 4.0} | {
        "linear": {},
        "yarn": {"original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 1.0},
        "llama3": {"original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }[rope]
    (folder / "config.json").write_text(json.dumps(config))
    got = ranks(our_logits(toolbox, folder, tokens), 1)[0]
    assert (got - hf_logits(folder, tokens)).abs().max() <= 1e-5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_round_trip_through_the_mesh_is_bit_equal(tied, tp, ranks, toolbox, tokenizer_dir, tmp_path):
    import torch
    from safetensors.torch import load_file

    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    # 15 rows of vocabulary do not divide by two: export must strip the padding.
    shape = ModelShape(hidden_size=32, ffn_hidden_size=64, head_dim=8, tied=tied)
    folder = create_checkpoint(tmp_path / "m", shape=shape, tokenizer_dir=tokenizer_dir, seed=1)
    parallel = {"tp": tp}

    def body(rank, world, port):
        backend = toolbox.backend(folder, rank, world, port, **parallel)
        backend.export_hf(tmp_path / "out")
        return list(dict(backend.state_for_sync()))

    names = ranks(body, tp)
    written, original = load_file(tmp_path / "out/model.safetensors"), load_file(folder / "model.safetensors")
    assert set(names[0]) == set(original)
    assert all(not extra for extra in names[1:]), "only the sync rank yields"
    assert set(written) == set(original)
    assert all(torch.equal(written[name], original[name]) for name in original)


@pytest.mark.parametrize("parallel", [{"dp": 2, "ep": 2}, {"tp": 2, "sp": True, "ep": 2, "etp": 1}], ids=str)
def test_round_trip_of_experts_is_bit_equal(parallel, ranks, toolbox, moe_dir, tmp_path):
    import torch
    from safetensors.torch import load_file

    def body(rank, world, port):
        toolbox.backend(moe_dir, rank, world, port, **parallel).export_hf(tmp_path / "out")

    ranks(body, 2)
    written, original = load_file(tmp_path / "out/model.safetensors"), load_file(moe_dir / "model.safetensors")
    assert set(written) == set(original)
    assert all(torch.equal(written[name], original[name]) for name in original)


def test_export_loads_in_transformers_with_its_tokenizer(ranks, toolbox, model_dir, tokens, tmp_path):
    from transformers import AutoTokenizer

    def body(rank, world, port):
        backend = toolbox.backend(model_dir, rank, world, port)
        backend.step(toolbox.batch(toolbox.samples()).for_rank(0))
        backend.export_hf(tmp_path / "export")
        return backend.policy.chunks[0].model(tokens, None, None).detach()

    trained = ranks(body, 1)[0]
    assert (hf_logits(tmp_path / "export", tokens) - trained).abs().max() <= 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "export").convert_tokens_to_ids("7") == 9
    assert not list(tmp_path.glob(".export*")), "nothing temporary is left behind"

"""The gradient of a step is the single process's gradient under every mesh."""

from __future__ import annotations

import math

import pytest

MESHES = {
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sp": True},
    "dp2": {"dp": 2},
    "tp2_dp2": {"tp": 2, "dp": 2},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
    "pp2_uneven": {"pp": 2, "last_pp_layers": 1},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "cp2": {"cp": 2},
    "cp2_contiguous": {"cp": 2, "cp_layout": "contiguous"},
    "tp2_sp_cp2": {"tp": 2, "sp": True, "cp": 2},
}
MOE_MESHES = {
    "dp2": {"dp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "tp2_ep2_etp1": {"tp": 2, "sp": True, "ep": 2, "etp": 1},
    "tp2_etp2": {"tp": 2, "sp": True},
}


def gradients(toolbox, model_dir, layout, steps=2, tokens=8192, recompute=None, **parallel):
    """Body of a rank: full gradients by Hugging Face name (rank 0), and the metrics of `steps` steps."""

    def body(rank, world, port):
        from miles.train.megatron import loop

        backend = toolbox.backend(model_dir, rank, world, port, recompute=recompute or {}, **parallel)
        multiple = parallel.get("tp", 1) if parallel.get("sp") else 1
        batch = toolbox.batch(
            toolbox.samples(ragged=True, response=6, off_policy=True),
            dp=parallel.get("dp", 1),
            layout=layout,
            # Two micro-batches at least, so that a pipeline is more than one step deep.
            tokens=min(tokens, 80) if parallel.get("pp") else tokens,
            multiple=multiple,
        )
        mine = batch.for_rank(backend.parallel_layout.dp_rank)
        loop.forward_backward(backend.policy.chunks, backend._inputs(mine), backend.policy_objective, backend.mesh)
        named = {item.name: item.grad.clone() for item in backend.policy.optimizer.masters}
        grads = dict(backend.policy.full_tensors.gather(named))
        return (
            grads,
            [backend.step(mine) for _ in range(steps)],
            backend.score(mine, model="policy", output="log_probs"),
        )

    return body


@pytest.fixture(scope="module")
def single(ranks, toolbox, model_dir):
    """Gradients and metrics of one process, rows in one micro-batch."""
    return ranks(gradients(toolbox, model_dir, "bshd"), 1)[0]


def check_equal(got, expected):
    import torch

    for name, gradient in expected[0].items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(
            got[0][name], gradient, rtol=1e-5, atol=1e-5 * scale, msg=lambda text, n=name: f"{n}: {text}"
        )
    for mine, theirs in zip(got[1], expected[1], strict=True):
        for key in ("train/loss", "train/grad_norm", "train/approx_kl"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("mesh", MESHES)
def test_gradient_equals_the_single_process_gradient(mesh, ranks, toolbox, model_dir, single):
    parallel = MESHES[mesh]
    world = math.prod(parallel.get(name, 1) for name in ("tp", "pp", "cp", "dp"))
    results = ranks(gradients(toolbox, model_dir, "bshd", **parallel), world)
    check_equal(results[0], single)
    assert abs(results[0][1][0]["train/loss"]) > 0.01, "a loss near zero would prove nothing"
    assert [metrics for _, metrics, _ in results] == [results[0][1]] * world, "metrics differ between ranks"


def test_tied_embeddings_agree_over_pipeline_stages(ranks, toolbox, tokenizer_dir, tmp_path):
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    shape = ModelShape(hidden_size=32, ffn_hidden_size=64, head_dim=8, init_std=0.2, tied=True)
    folder = create_checkpoint(tmp_path / "tied", shape=shape, tokenizer_dir=tokenizer_dir, seed=3)
    expected = ranks(gradients(toolbox, folder, "bshd"), 1)[0]
    results = ranks(gradients(toolbox, folder, "bshd", pp=2), 2)
    check_equal(results[0], expected)


def test_too_few_micro_batches_for_interleaved_stages_are_refused(ranks, toolbox, model_dir):
    from miles.train.errors import TrainError

    def body(rank, world, port):
        backend = toolbox.backend(model_dir, rank, world, port, pp=2, vpp=2)
        backend.step(toolbox.batch(toolbox.samples()).for_rank(0))

    with pytest.raises(TrainError, match=r"1 micro-batches are not a multiple of pp=2.*micro_batch_multiple=2"):
        ranks(body, 2)


@pytest.fixture(scope="module")
def single_moe(ranks, toolbox, moe_dir):
    return ranks(gradients(toolbox, moe_dir, "bshd"), 1)[0]


@pytest.mark.parametrize("mesh", MOE_MESHES)
def test_gradient_of_experts_equals_the_single_process_gradient(mesh, ranks, toolbox, moe_dir, single_moe):
    parallel = MOE_MESHES[mesh]
    results = ranks(gradients(toolbox, moe_dir, "bshd", **parallel), 2)
    check_equal(results[0], single_moe)


@pytest.mark.parametrize(("layout", "tokens"), [("thd", 8192), ("thd", 24), ("bshd", 24)])
def test_gradient_does_not_depend_on_layout_or_micro_batches(layout, tokens, ranks, toolbox, model_dir, single):
    check_equal(ranks(gradients(toolbox, model_dir, layout, tokens=tokens), 1)[0], single)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize(
    "recompute",
    [
        {"granularity": "selective"},
        {"granularity": "full"},
        {"granularity": "full", "method": "block", "num_layers": 2},
    ],
    ids=["selective", "full_uniform", "full_block"],
)
def test_recompute_gives_the_same_gradient(recompute, layout, ranks, toolbox, model_dir, single):
    check_equal(ranks(gradients(toolbox, model_dir, layout, recompute=recompute), 1)[0], single)


def test_packed_documents_under_tensor_and_sequence_parallel(ranks, toolbox, model_dir, single):
    results = ranks(gradients(toolbox, model_dir, "thd", tokens=40, tp=2, sp=True), 2)
    check_equal(results[0], single)

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algos.config import AlgoConfig, CorrectionConfig, KLConfig, OPSMConfig, RejectConfig
from miles.algos.context import ContextLayout, ContiguousAllGather, Zigzag, localize
from miles.algos.objective import step_objective
from miles.algos.step_batches import prepare_steps
from miles.data.batch_layout import BatchLayout
from miles.data.sample import Sample, Status
from miles.data.schedule import ScheduleConfig
from miles.data.tensors import to_tensors

VOCAB = 23


def micro_batch_of(samples, layout):
    config = ScheduleConfig(layout=BatchLayout(layout), max_tokens_per_gpu=100_000)
    return prepare_steps(samples, AlgoConfig(advantage="rloo"), config).steps[0].ranks[0][0]


@st.composite
def problems(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 13)), min_size=1, max_size=6))
    samples = [
        Sample(f"s{i}", 0, i, np.arange(p + r, dtype=np.int64) + 100 * i, p, reward=float(i), status=Status.COMPLETED)
        for i, (p, r) in enumerate(shapes)
    ]
    kind, size = draw(st.sampled_from(["zigzag", "contiguous"])), draw(st.integers(1, 4))
    return samples, draw(st.sampled_from(["thd", "bshd"])), kind, size, draw(st.sampled_from([1, 2, 3]))


def layout_of(kind: str, size: int, rank: int, multiple: int = 1) -> ContextLayout:
    return (Zigzag if kind == "zigzag" else ContiguousAllGather)(size, rank, multiple)


@settings(max_examples=120)
@given(problems())
def test_response_indices_partition_the_response(problem):
    """Every response token has exactly one owner, whose logit row is the token before it."""
    samples, batch_layout, kind, size, multiple = problem
    micro_batch = micro_batch_of(samples, batch_layout)
    owned: list[tuple[int, int]] = []
    for rank in range(size):
        layout = layout_of(kind, size, rank, multiple)
        local = localize(micro_batch, layout).micro_batch
        assert local.input_ids.size % multiple == 0
        read = local.input_ids.ravel()[local.logit_index]
        assert (np.diff(local.sequence) >= 0).all()
        for number, j, target, token in zip(
            local.sequence.tolist(), local.response_index.tolist(), local.target_ids, read, strict=True
        ):
            sample = samples[micro_batch.sample_index[number]]
            assert target == sample.tokens[sample.prompt_length + j]
            assert token == sample.tokens[sample.prompt_length + j - 1]
            owned.append((number, j))
    expected = [(s, j) for s, i in enumerate(micro_batch.sample_index) for j in range(samples[i].response_length)]
    assert sorted(owned) == sorted(expected)


def test_a_rank_without_response_tokens_holds_its_share_of_the_prompts():
    samples = [
        Sample(name, 0, i, np.arange(9, dtype=np.int64), 8, reward=float(i), status=Status.COMPLETED)
        for i, name in enumerate("st")
    ]
    local = localize(micro_batch_of(samples, "bshd"), ContiguousAllGather(2, 0)).micro_batch
    assert len(local.logit_index) == 0
    assert local.input_ids.size == 10
    assert local.token_counts.tolist() == [0, 0]


@pytest.mark.parametrize("layout", [Zigzag(2, 0), ContiguousAllGather(2, 0, multiple=2)])
def test_a_layout_that_does_not_divide_is_an_error(layout):
    with pytest.raises(ValueError, match="pad"):
        layout.held([5, 4], 0)


def test_zigzag_gives_each_rank_a_head_and_a_tail_of_every_document():
    assert Zigzag(2, 0).held([8, 4], 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert Zigzag(2, 0).held([8, 4], 1).tolist() == [2, 3, 4, 5, 9, 10]


CONFIGS = {
    "ppo_clip": AlgoConfig(),
    "dual_clip": AlgoConfig(loss="dual_clip", dual_clip_c=2.0),
    "gspo": AlgoConfig(loss="gspo", eps_clip=0.02),
    "cispo": AlgoConfig(loss="cispo"),
    "sft": AlgoConfig(loss="sft"),
    "opsm": AlgoConfig(opsm=OPSMConfig(delta=0.01)),
    "sequence TIS + MIS": AlgoConfig(
        correction=CorrectionConfig(mode="truncate", level="sequence", hi=1.05, reject=RejectConfig(hi=1.02), veto=0.5)
    ),
    "gspo + kl + entropy": AlgoConfig(
        loss="gspo", kl=KLConfig(where="loss", estimator="k3", coef=0.2, unbiased=True), entropy_coef=0.1
    ),
    "fixed": AlgoConfig(reduction="fixed", fixed_length=9),
    "token mean, distilled": AlgoConfig(reduction="token_mean", opd_coef=0.5),
}


class Toy(torch.nn.Module):
    """Logits from token and position alone, so that no attention has to cross ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = torch.nn.Embedding(VOCAB, VOCAB)
        self.position = torch.nn.Embedding(64, VOCAB)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.token(ids) * 0.3 + self.position(positions) * 0.3


def gradient_and_metrics(micro_batches, config, *, group=None):
    """Gradient of the summed loss (this rank's share), loss, metrics of the group."""
    model = Toy()
    total, sums = 0.0, None
    for micro_batch in micro_batches:
        batch = to_tensors(micro_batch)
        logits = model(batch.input_ids, batch.position_ids).flatten(0, 1)[batch.logit_index]
        log_p = logits.log_softmax(-1)
        picked = log_p.gather(1, batch.target_ids[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        loss, parts = step_objective(picked, batch, config, entropy=entropy, cp_group=group)
        loss.backward()
        total += loss.item()
        sums = parts if sums is None else sums + parts
    assert sums is not None
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return gradient, total, sums.all_reduce(group).finish()


@pytest.mark.parametrize("batch_layout", ["thd", "bshd"])
def test_grad_equal_cp1_cp2_thd_bshd_for_every_loss(gloo_ranks, make_samples, batch_layout):
    samples = make_samples(7, vocab=VOCAB, seed=3)
    samples[2].loss_mask[:] = 0
    reference = {}
    for name, config in CONFIGS.items():
        one = prepare_steps(samples, config, ScheduleConfig(max_tokens_per_gpu=1000)).steps[0]
        reference[name] = gradient_and_metrics(one.ranks[0], config)

    def work(rank: int):
        import torch.distributed as dist

        out = {}
        for name, config in CONFIGS.items():
            schedule = ScheduleConfig(layout=BatchLayout(batch_layout, context_parallel=2), max_tokens_per_gpu=40)
            batch = prepare_steps(samples, config, schedule).steps[0]
            for layout in (Zigzag(2, rank), ContiguousAllGather(2, rank)):
                mine = [localize(mb, layout).micro_batch for mb in batch.ranks[0]]
                gradient, loss, metrics = gradient_and_metrics(mine, config, group=dist.group.WORLD)
                dist.all_reduce(gradient)
                out[name, type(layout).__name__] = (gradient, loss, metrics)
        return out

    ranks = gloo_ranks(2, work, limit_s=60)
    for (name, layout), (gradient, loss, metrics) in ranks[0].items():
        expected_gradient, expected_loss, expected_metrics = reference[name]
        where = f"{name}, {layout}, {batch_layout}"
        scale = float(expected_gradient.norm())
        assert scale > 0
        assert float((gradient - expected_gradient).norm()) <= 1e-5 * scale, where
        assert loss + ranks[1][name, layout][1] == pytest.approx(expected_loss, rel=1e-5, abs=1e-7), where
        assert metrics.keys() == expected_metrics.keys()
        for key, value in expected_metrics.items():
            tolerance = 0.011 if key == "mismatch/w_p99" else 1e-5
            assert metrics[key] == pytest.approx(value, rel=tolerance, abs=1e-6), f"{key} of {where}"

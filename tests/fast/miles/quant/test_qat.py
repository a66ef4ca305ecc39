"""Fake quantisation: gradients, hooks, recompute, shared and sharded maxima."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from miles.kernels.nvfp4_qdq import reference
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.quant import qat
from miles.quant.codecs import nvfp4
from miles.quant.config import NVFP4Options, QuantConfig
from miles.quant.errors import QATHookMissing, QuantConfigError, QuantError
from miles.quant.hook import FakeQATHook
from miles.quant.packed import PackedExperts, pack_named
from miles.quant.scope import Ignore

CONFIG = NVFP4QDQConfig(True, error_mode=ErrorMode.MSE, error_use_fast_math=True, decode="stored")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(32, 48, bias=False)
        self.up_proj = nn.Linear(32, 48, bias=False)
        self.down_proj = nn.Linear(48, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MLP(nn.Module):
    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.shared_expert = Expert()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared_expert(x) + sum(expert(x) for expert in self.experts)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


def test_ste_grad_and_main_grad() -> None:
    w = nn.Parameter(torch.randn(16, 32))
    w.main_grad = torch.zeros_like(w)
    (y,) = qat.maybe_fake_quantize([w], ["mlp.experts.0.down_proj.weight"], CONFIG)
    assert torch.equal(y, reference.qdq(w.detach(), CONFIG))
    assert y.main_grad is w.main_grad
    upstream = torch.randn(16, 32)
    y.backward(upstream)
    assert torch.equal(w.grad, upstream)


def test_out_of_scope_names_and_a_missing_config_give_the_same_objects_back() -> None:
    w = nn.Parameter(torch.randn(16, 32))
    assert qat.maybe_fake_quantize([w], ["mlp.shared_expert.down_proj.weight"], CONFIG)[0] is w
    assert qat.maybe_fake_quantize([w], ["mlp.experts.0.down_proj.weight"], None)[0] is w


def test_forward_uses_quantised_weights_and_parameters_stay() -> None:
    model, x = Model(), torch.randn(3, 32)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    state_names = list(model.state_dict())
    plain = model(x)
    qat.install(model, CONFIG)
    y = model(x)
    assert not torch.equal(y, plain)
    manual = Model()
    for expert in manual.mlp.experts:
        amax = torch.maximum(*(reference.tensor_amax(p.weight.detach()) for p in (expert.gate_proj, expert.up_proj)))
        for linear, a in ((expert.gate_proj, amax), (expert.up_proj, amax), (expert.down_proj, None)):
            linear.weight.data = reference.qdq(linear.weight.data, CONFIG, a)
    assert torch.equal(y, manual(x))
    assert list(model.state_dict()) == state_names
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_gradient_reaches_the_parameter_through_the_hook() -> None:
    model, x = Model(), torch.randn(3, 32)
    qat.install(model, CONFIG)
    model(x).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())


def test_missing_hook_is_error() -> None:
    model, x = Model(), torch.randn(3, 32)
    qat.install(model, CONFIG)
    model(x)
    qat.assert_called(model, 1)
    del model.mlp.experts[1].up_proj.__dict__["forward"]
    model(x)
    model(x)
    with pytest.raises(
        QATHookMissing, match=r"1 of 6 modules in a step of 2 micro-batches .*mlp\.experts\.1\.up_proj \(0\)"
    ):
        qat.assert_called(model, 2)


def test_too_few_calls_for_the_micro_batches_is_error() -> None:
    model = Model()
    qat.install(model, CONFIG)
    model(torch.randn(1, 32))
    with pytest.raises(QATHookMissing, match="6 of 6"):
        qat.assert_called(model, 2)


def test_scoring_calls_do_not_make_up_for_a_training_pass() -> None:
    model, x = Model(), torch.randn(3, 32)
    qat.install(model, CONFIG)
    with torch.no_grad():
        model(x)
    del model.mlp.experts[0].gate_proj.__dict__["forward"]
    model(x)
    with pytest.raises(QATHookMissing, match=r"1 of 6 .*mlp\.experts\.0\.gate_proj \(0\)"):
        qat.assert_called(model, 1)


def test_a_model_that_was_never_hooked_is_error() -> None:
    with pytest.raises(QATHookMissing, match="never installed"):
        qat.assert_called(Model(), 1)


@pytest.mark.parametrize(("bad", "text"), [(float("nan"), "nan"), (float("inf"), "inf")])
def test_a_weight_that_is_not_finite_stops_the_step_with_its_name(bad: float, text: str) -> None:
    model = Model()
    qat.install(model, CONFIG)
    model.mlp.experts[1].down_proj.weight.data[3, 7] = bad
    with pytest.raises(QuantError, match=rf"mlp\.experts\.1\.down_proj\.weight: {text} at index \[3, 7\]"):
        model(torch.randn(1, 32))


def test_what_the_kernels_flagged_is_read_once_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from miles.kernels.nvfp4_qdq import api

    def flagged() -> None:
        raise ValueError("a weight holds NaN or infinity")

    model = Model()
    qat.install(model, CONFIG)
    model(torch.randn(1, 32))
    monkeypatch.setattr(qat, "_takes_kernel", lambda weights: True)
    monkeypatch.setattr(api, "raise_if_flagged", flagged)
    with pytest.raises(QuantError, match="fake quantisation: a weight holds NaN or infinity"):
        qat.assert_called(model, 1)


def test_names_found_equal_the_scope_and_ignored_ones_are_left_out() -> None:
    model = Model()
    state = qat.install(model, CONFIG, ignore=Ignore(("mlp.experts.0.",)))
    assert sorted(state.names) == [f"mlp.experts.1.{p}_proj.weight" for p in ("down", "gate", "up")]


def test_the_ignore_list_speaks_of_hugging_face_names() -> None:
    model = Model()
    names = {n: (n.replace("mlp.", "model.layers.7.mlp."),) for n, _ in model.named_parameters()}
    qat_state = qat.install(
        model, CONFIG, ignore=Ignore(("model.layers.7.mlp.experts.0.",)), hf_names=names.__getitem__
    )
    assert all(name.startswith("mlp.experts.1.") for name in qat_state.names)
    assert len(qat_state.names) == 3


def test_half_of_a_fused_weight_cannot_be_ignored() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.ModuleDict({"gate_up_proj": nn.Linear(32, 96, bias=False)})])})
    halves = ("experts.0.gate_proj.weight", "experts.0.up_proj.weight")
    with pytest.raises(QuantConfigError, match=r"keeps experts\.0\.up_proj\.weight but not the other half"):
        qat.install(model, CONFIG, ignore=Ignore((halves[1],)), hf_names=lambda name: halves)


def test_options_that_name_nothing_or_everything_are_refused() -> None:
    names = [f"model.layers.{i}.mlp.experts.0.{h}_proj.weight" for i in range(2) for h in ("gate", "up", "down")]
    config = {"num_hidden_layers": 2}
    assert NVFP4Options(bf16_first_layers=1).scope(names, config).select(names) == names[3:]
    for options, text in (
        ({"ignore": ("model.layers.0",)}, r"'model\.layers\.0' matches no weight of the model"),
        ({"ignore": (names[0],)}, r"half is missing: .*gate_proj"),
        ({"ignore": ("model.",)}, "no routed expert is left to quantise"),
        ({"bf16_last_layers": 3}, "do not fit in 2 decoder layers"),
    ):
        with pytest.raises(QuantConfigError, match=text):
            NVFP4Options(**options).scope(names, config)


def test_recompute_same_bits() -> None:
    model, x = Model(), torch.randn(3, 32, requires_grad=True)
    qat.install(model, CONFIG)
    y = model(x)
    y.sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert set(qat.calls(model).values()) == {1}
    model.zero_grad()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())
    assert set(qat.calls(model).values()) == {3}


def test_gradient_accumulation_fusion_is_refused() -> None:
    model = Model()
    model.mlp.experts[0].up_proj.gradient_accumulation_fusion = True
    with pytest.raises(QuantConfigError, match="gradient accumulation fusion is on"):
        qat.install(model, CONFIG)


def test_a_sharded_k_that_is_no_multiple_of_16_is_refused() -> None:
    model = Model()
    model.mlp.experts[0].down_proj = nn.Linear(24, 32, bias=False)
    with pytest.raises(QuantConfigError, match=r"\(sharded\) K a multiple of 16"):
        qat.install(model, CONFIG)


def test_no_expert_and_double_install_are_refused() -> None:
    with pytest.raises(QuantConfigError, match="no routed-expert weight"):
        qat.install(nn.Linear(16, 16), CONFIG)
    qat.install(nn.Linear(16, 16), CONFIG, allow_empty=True)
    model = Model()
    qat.install(model, CONFIG)
    with pytest.raises(QuantConfigError, match="already installed"):
        qat.install(model, CONFIG)


def test_hook_object_installs_counts_and_stops_the_run() -> None:
    hook = FakeQATHook(QuantConfig(fake_qat="nvfp4", nvfp4=NVFP4Options(decode="stored")), environ={})
    with pytest.raises(QATHookMissing, match="never called its install hook"):
        hook.after_step(1)
    model = Model()
    hook(model)
    model(torch.randn(2, 32))
    hook.after_step(1)
    with pytest.raises(QATHookMissing):
        hook.after_step(1)


class Packed(nn.Module):
    """Hugging Face's packed form, read by attribute in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 32, 16))
        self.down_proj = nn.Parameter(torch.randn(3, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("bk,emk->ebm", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("ebk,emk->bm", gate * up, self.down_proj)


def test_packed_experts_are_quantised_per_expert() -> None:
    model = nn.ModuleDict({"experts": Packed()})
    x = torch.randn(4, 16)
    qat.install(model, CONFIG)
    y = model["experts"](x)
    manual = Packed()
    for name in ("gate_up_proj", "down_proj"):
        source = getattr(model["experts"], name).detach()
        getattr(manual, name).data = torch.stack([reference.qdq(e, CONFIG) for e in source])
    assert torch.equal(y, manual(x))


def test_gate_up_shared_amax_three_paths() -> None:
    """Fused fc1, discrete halves in the trainer, and the export give one tensor scale and the same values."""
    gate, up = torch.randn(48, 32), torch.randn(48, 32) * 3
    fused = reference.qdq(torch.cat((gate, up)), CONFIG)
    model = Model()
    model.mlp.experts[0].gate_proj.weight.data, model.mlp.experts[0].up_proj.weight.data = gate.clone(), up.clone()
    state = qat.install(model, CONFIG)
    halves = [
        state.quantise(h)[0].detach()
        for h in state.hooks
        if h.name in ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj")
    ]
    assert torch.equal(torch.cat(halves), fused)
    named = [("mlp.experts.0.gate_proj.weight", gate), ("mlp.experts.0.up_proj.weight", up)]
    exported = dict(pack_named(named, CONFIG))
    scale_2 = [exported[f"mlp.experts.0.{h}_proj.weight_scale_2"] for h in ("gate", "up")]
    assert torch.equal(*scale_2)
    decoded = [
        nvfp4.dequantize(
            nvfp4.Packed(exported[f"{n[:-7]}.weight"], exported[f"{n[:-7]}.weight_scale"].view(torch.uint8), s, s),
            CONFIG,
            torch.float32,
        )
        for (n, _), s in zip(named, scale_2, strict=True)
    ]
    assert torch.equal(torch.cat(decoded), fused)


def test_engine_experts_equal_trainer_values_bit_for_bit() -> None:
    trainer = Model()
    live = {n: p.detach().clone() for n, p in trainer.named_parameters()}
    engine = PackedExperts(CONFIG)
    assert engine.refresh(live) == 6
    state = qat.install(trainer, CONFIG)
    for hook in state.hooks:
        assert torch.equal(live[f"{hook.name}.weight"], state.quantise(hook)[0].detach())
    dense = sum(p.numel() * 4 for n, p in trainer.named_parameters() if n in engine.store)
    assert engine.nbytes < dense / 6
    untouched = [n for n in live if "shared_expert" in n]
    assert all(torch.equal(live[n], dict(trainer.named_parameters())[n]) for n in untouched)


def _etp_rank(rank: int, address: str, shards: list[torch.Tensor], out) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    w = shards[rank]
    amax = qat.shared_amax([w], [0], dist.group.WORLD)
    y = qat.maybe_fake_quantize([w], ["mlp.experts.0.down_proj.weight"], CONFIG, amax=amax)[0]
    out.put((rank, y.numpy()))
    out.close()
    out.join_thread()
    dist.destroy_process_group()
    os._exit(0)


@pytest.mark.parametrize("dim", [0, 1], ids=["fc1 rows", "fc2 K"])
def test_amax_over_etp2_equals_unsharded(dim: int, tmp_path) -> None:
    import multiprocessing

    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.1, 3, 64)
    shards = [s.contiguous() for s in weight.chunk(2, dim)]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    address = f"file://{tmp_path}/rendezvous"
    workers = [context.Process(target=_etp_rank, args=(r, address, shards, queue)) for r in range(2)]
    for worker in workers:
        worker.start()
    parts = dict(queue.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(timeout=30)
    whole = torch.cat([torch.from_numpy(parts[r]) for r in range(2)], dim)
    assert torch.equal(whole, reference.qdq(weight, CONFIG))

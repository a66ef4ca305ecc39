"""bf16-to-nvfp4, bf16-to-fp8, fp8-to-mxfp8 and requantise."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from miles.kernels.formats import e8m0_decode
from miles.kernels.nvfp4_qdq import reference
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.quant import contract
from miles.quant.cli import convert_app
from miles.quant.codecs import fp8_block, mxfp8, nvfp4
from miles.quant.convert import bf16_to_fp8, fp8_to_mxfp8, to_nvfp4
from miles.quant.errors import ConversionError

requantise = partial(to_nvfp4.convert, kind="requantise")
CONFIG = NVFP4QDQConfig(True, error_mode=ErrorMode.MSE, error_use_fast_math=True, decode="stored")
EXPERT = "model.layers.{layer}.mlp.experts.0.{half}_proj.weight"


@pytest.fixture
def bf16_checkpoint(tmp_path: Path) -> Path:
    """Two shards; gate and up of a layer live in different ones."""
    torch.manual_seed(0)
    directory = tmp_path / "bf16"
    directory.mkdir()
    first, second = {}, {}
    for layer in range(3):
        for half, shape in (("gate", (48, 64)), ("up", (48, 64)), ("down", (64, 48))):
            scale = 4.0 if half == "up" else 1.0
            (second if half == "up" else first)[EXPERT.format(layer=layer, half=half)] = (
                torch.randn(shape) * scale
            ).to(torch.bfloat16)
        first[f"model.layers.{layer}.mlp.shared_expert.up_proj.weight"] = torch.randn(48, 64).to(torch.bfloat16)
        second[f"model.layers.{layer}.self_attn.q_proj.weight"] = torch.randn(64, 64).to(torch.bfloat16)
        second[f"model.layers.{layer}.mlp.gate.weight"] = torch.randn(2, 64).to(torch.bfloat16)
    second["lm_head.weight"] = torch.randn(32, 64).to(torch.bfloat16)
    save_file(first, directory / "model-a.safetensors")
    save_file(second, directory / "model-b.safetensors")
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 3}))
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for p in sorted(directory.glob("*.safetensors")) for k, v in load_file(p).items()}


def decoded(after: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    stem = name[:-6]
    s = after[stem + "weight_scale_2"]
    return nvfp4.dequantize(nvfp4.Packed(after[name], after[stem + "weight_scale"].view(torch.uint8), s, s), CONFIG)


def test_cross_shard_pair_shares_its_maximum(bf16_checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    to_nvfp4.convert(bf16_checkpoint, target, config=CONFIG)
    before, after = tensors(bf16_checkpoint), tensors(target)
    for layer in range(3):
        gate, up, down = (EXPERT.format(layer=layer, half=h) for h in ("gate", "up", "down"))
        shared = torch.maximum(reference.tensor_amax(before[gate]), reference.tensor_amax(before[up]))
        for name, amax in ((gate, shared), (up, shared), (down, None)):
            assert torch.equal(decoded(after, name), reference.qdq(before[name], CONFIG, amax)), name
            assert float(after[name[:-6] + "input_scale"]) == 1.0
    assert torch.equal(
        after["model.layers.0.mlp.shared_expert.up_proj.weight"],
        before["model.layers.0.mlp.shared_expert.up_proj.weight"],
    )
    assert "model.layers.0.mlp.shared_expert.up_proj.weight_scale" not in after


def test_nvfp4_contract_and_config(bf16_checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    to_nvfp4.convert(bf16_checkpoint, target, config=CONFIG, ignore=("model.layers.1.",), bf16_last_layers=1)
    found = contract.read(target)
    assert found.nvfp4() == CONFIG
    assert found.tensors == tuple(sorted(EXPERT.format(layer=0, half=h) for h in ("gate", "up", "down")))
    assert found.ignore == ("model.layers.1.", "model.layers.2.")
    quantization = json.loads((target / "config.json").read_text())["quantization_config"]
    assert quantization["quant_algo"] == "NVFP4"
    excluded = quantization["exclude_modules"]
    assert "model.layers.1.mlp.experts" in excluded
    assert "lm_head" in excluded
    assert "model.layers.0.mlp.shared_expert.up_proj" in excluded
    assert not any(e.endswith((".weight", ".")) for e in excluded)


def test_a_missing_half_is_refused(bf16_checkpoint: Path, tmp_path: Path) -> None:
    shard = bf16_checkpoint / "model-b.safetensors"
    kept = {k: v for k, v in load_file(shard).items() if k != EXPERT.format(layer=1, half="up")}
    save_file(kept, shard)
    with pytest.raises(ConversionError, match=r"half is missing: model\.layers\.1\.mlp\.experts\.0\.up_proj"):
        to_nvfp4.convert(bf16_checkpoint, tmp_path / "out")


@pytest.mark.parametrize("scale", ["fp32", "e8m0"])
def test_bf16_to_fp8_covers_projections_only(scale: str, bf16_checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    bf16_to_fp8.convert(bf16_checkpoint, target, scale=scale)
    before, after = tensors(bf16_checkpoint), tensors(target)
    converted = {n for n, t in after.items() if t.dtype == torch.float8_e4m3fn}
    assert converted == {n for n in before if "_proj." in n}
    name = EXPERT.format(layer=0, half="up")
    s = after[name + "_scale_inv"]
    s = s if scale == "fp32" else s.view(torch.uint8)
    codes, expected = fp8_block.quantize(before[name], scale=scale)
    assert torch.equal(after[name].view(torch.uint8), codes)
    assert torch.equal(s, expected)
    excluded = json.loads((target / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.mlp.gate" in excluded


def test_fp8_to_mxfp8_is_exact_for_power_of_two_scales(bf16_checkpoint: Path, tmp_path: Path) -> None:
    bf16_to_fp8.convert(bf16_checkpoint, tmp_path / "fp8", scale="e8m0", scope="experts", ignore=("re:.*down_proj.*",))
    before = tensors(tmp_path / "fp8")
    report = fp8_to_mxfp8.convert(tmp_path / "fp8", tmp_path / "mxfp8")
    after = tensors(tmp_path / "mxfp8")
    assert report["totals"]["tensors"] == 6
    for name in (n for n, t in before.items() if t.dtype == torch.float8_e4m3fn):
        scale = name + "_scale_inv"
        old = fp8_block.dequantize(before[name].view(torch.uint8), before[scale].view(torch.uint8), torch.float32)
        new = mxfp8.dequantize(after[name].view(torch.uint8), after[scale].view(torch.uint8), torch.float32)
        assert torch.equal(old, new)
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
    assert contract.read(tmp_path / "mxfp8").lossless


def test_fp8_to_mxfp8_accepts_fp32_powers_of_two_and_refuses_others(tmp_path: Path) -> None:
    source = tmp_path / "fp8"
    source.mkdir()
    weight = torch.randint(0, 120, (130, 64), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = e8m0_decode(torch.tensor([[120], [130]], dtype=torch.uint8))
    save_file({"a.weight": weight, "a.weight_scale_inv": scales}, source / "model.safetensors")
    fp8_to_mxfp8.convert(source, tmp_path / "ok")
    assert (
        tensors(tmp_path / "ok")["a.weight_scale_inv"].view(torch.uint8).tolist() == [[120] * 2] * 128 + [[130] * 2] * 2
    )
    save_file({"a.weight": weight, "a.weight_scale_inv": scales * 1.25}, source / "model.safetensors")
    with pytest.raises(ConversionError, match=r"a\.weight_scale_inv: scale .* of tile \[0, 0\] is not a power of two"):
        fp8_to_mxfp8.convert(source, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_requantise_repairs_quantised_shared_experts(bf16_checkpoint: Path, tmp_path: Path) -> None:
    """A legacy NVFP4 checkpoint: no contract, shared experts quantised too, gate and up with their own maxima."""
    legacy = tmp_path / "legacy"
    legacy.mkdir()
    out: dict[str, torch.Tensor] = {}
    for name, value in tensors(bf16_checkpoint).items():
        if "_proj" not in name or "self_attn" in name:
            out[name] = value
            continue
        packed = nvfp4.quantize(value, NVFP4QDQConfig())
        out |= {
            name: packed.weight,
            name + "_scale": packed.weight_scale.view(torch.float8_e4m3fn),
            name + "_scale_2": packed.weight_scale_2,
        }
    save_file(out, legacy / "model.safetensors")
    (legacy / "config.json").write_text(json.dumps({"num_hidden_layers": 3}))
    with pytest.raises(contract.QuantConfigError, match=r"shared experts are quantised .*miles convert requantise"):
        contract.read(legacy)
    requantise(legacy, tmp_path / "new", config=CONFIG)
    after = tensors(tmp_path / "new")
    found = contract.read(tmp_path / "new")
    assert found.nvfp4() == CONFIG
    shared = "model.layers.0.mlp.shared_expert.up_proj.weight"
    assert after[shared].dtype == torch.bfloat16
    gate, up = (EXPERT.format(layer=0, half=h) for h in ("gate", "up"))
    assert torch.equal(after[gate[:-6] + "weight_scale_2"], after[up[:-6] + "weight_scale_2"])
    plain = {n: nvfp4.qdq(tensors(bf16_checkpoint)[n], NVFP4QDQConfig(decode="stored")) for n in (gate, up, shared)}
    assert torch.equal(after[shared], plain[shared])
    amax = torch.maximum(reference.tensor_amax(plain[gate]), reference.tensor_amax(plain[up]))
    assert torch.equal(decoded(after, gate), reference.qdq(plain[gate], CONFIG, amax))


def test_requantise_reads_fp8_blocks(bf16_checkpoint: Path, tmp_path: Path) -> None:
    bf16_to_fp8.convert(bf16_checkpoint, tmp_path / "fp8")
    requantise(tmp_path / "fp8", tmp_path / "new", config=CONFIG)
    after = tensors(tmp_path / "new")
    assert after[EXPERT.format(layer=0, half="down")].dtype == torch.uint8
    assert after["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16


def test_commands_resume_and_check(bf16_checkpoint: Path, tmp_path: Path) -> None:
    runner, out = CliRunner(), str(tmp_path / "out")
    options = ["--4over6", "--error-mode", "MSE", "--fp16-domain", "--decode", "stored"]
    done = runner.invoke(convert_app, ["bf16-to-nvfp4", str(bf16_checkpoint), out, *options])
    assert done.exit_code == 0, done.output
    assert "9 tensors converted, largest error 2.48" in done.output
    (tmp_path / "out" / "COMPLETE").unlink()
    assert runner.invoke(convert_app, ["bf16-to-nvfp4", str(bf16_checkpoint), out, *options, "--resume"]).exit_code == 0
    shown = runner.invoke(convert_app, ["check", out])
    assert json.loads(shown.output)["four_over_six"]["error_mode"] == "MSE"
    other = str(tmp_path / "other")
    assert runner.invoke(convert_app, ["bf16-to-nvfp4", str(bf16_checkpoint), other]).exit_code == 0
    compared = runner.invoke(convert_app, ["check", other, "--against", out])
    assert "four_over_six.on: expected True, found False" in str(compared.exception)
    bad = runner.invoke(convert_app, ["bf16-to-nvfp4", str(bf16_checkpoint), str(tmp_path / "x"), "--e4m3-max", "256"])
    assert "needs use_4over6" in str(bad.exception)

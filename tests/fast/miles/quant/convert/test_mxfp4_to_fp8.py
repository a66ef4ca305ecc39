"""`miles convert mxfp4-to-fp8`: exactness, loss policies, faults found before any write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from miles.kernels.formats import e2m1_decode, e4m3_decode, e8m0_decode, unpack_e2m1
from miles.quant import contract
from miles.quant.cli import convert_app
from miles.quant.convert.mxfp4_to_fp8 import convert
from miles.quant.errors import ConversionError

LOSSY = "model.layers.1.mlp.experts.0.up_proj.weight"


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        out |= load_file(path)
    return out


def decode_source(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return e2m1_decode(unpack_e2m1(packed)).double() * e8m0_decode(scale.view(torch.uint8)).double().repeat_interleave(
        32, 1
    )


def decode_result(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, cols = q.shape
    block = 32 if scale.shape[1] == cols // 32 else 128
    s = e8m0_decode(scale.view(torch.uint8)).double()
    s = s if block == 32 else s.repeat_interleave(128, 0)[:rows]
    return e4m3_decode(q.view(torch.uint8)).double() * s.repeat_interleave(block, 1)[:, :cols]


def test_a_clean_checkpoint_is_converted_exactly(mxfp4_checkpoint, tmp_path: Path) -> None:
    source, target = mxfp4_checkpoint(), tmp_path / "out"
    report = convert(source, target)
    before, after = tensors(source), tensors(target)
    assert set(before) == set(after)
    weights = [n for n, t in before.items() if t.dtype == torch.int8]
    assert len(weights) == 9
    for name in weights:
        scale = name[:-6] + "scale"
        assert after[name].dtype == torch.float8_e4m3fn
        assert tuple(after[scale].shape) == (2, 2)
        assert torch.equal(decode_result(after[name], after[scale]), decode_source(before[name], before[scale]))
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert report["totals"]["lossy_elements"] == 0
    assert report["totals"]["tiles"] == 9 * 4
    assert all(len(t["sha256_in"]) == len(t["sha256_out"]) == 64 for t in report["tensors"])


def test_layout_index_config_contract_and_marker(mxfp4_checkpoint, tmp_path: Path) -> None:
    source, target = mxfp4_checkpoint(), tmp_path / "out"
    convert(source, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    for name, shard in index["weight_map"].items():
        if name.endswith(".scale"):
            assert shard == index["weight_map"][name[:-5] + "weight"], "a scale is written beside its weight"
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors(target).values())
    config = json.loads((target / "config.json").read_text())
    assert "expert_dtype" not in config
    assert config["text_config"] == {"a": 1}
    found = contract.read(target)
    assert found.lossless
    assert found.format == "fp8_block"
    assert (
        (target / "COMPLETE").read_text().strip()
        == found.digest()
        == config["quantization_config"]["quantization_contract_digest"]
    )
    from safetensors import safe_open

    with safe_open(target / "model-0.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt", "quantization_contract_digest": found.digest()}
    assert (target / "tokenizer.json").exists()
    assert not list(target.glob("*.tmp"))


def test_loss_fails_by_default_lists_the_tile_and_writes_nothing(mxfp4_checkpoint, tmp_path: Path) -> None:
    source, target = mxfp4_checkpoint(lossy=True), tmp_path / "out"
    with pytest.raises(
        ConversionError, match=rf"1 tiles in 1 weights would round.*\n  {LOSSY} tile \[1, 1\]: k=\d+, 32 elements"
    ):
        convert(source, target)
    assert not target.exists()


@pytest.mark.parametrize("k", [14, 15])
def test_the_scan_of_scales_finds_loss_from_fifteen_steps_on(k: int, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    packed = torch.full((2, 16), 0x11, dtype=torch.uint8)  # 0.5 everywhere
    scale = torch.tensor([[120], [120 - k]], dtype=torch.uint8)
    save_file({"a.weight": packed, "a.scale": scale}, source / "model.safetensors")
    if k <= 14:
        assert convert(source, tmp_path / "out")["tensors"][0]["max_k"] == k
        return
    with pytest.raises(ConversionError, match=r"a\.weight tile \[0, 0\]: k=15, 32 elements"):
        convert(source, tmp_path / "out")


def test_on_loss_mxfp8_keeps_that_weight_exact_and_records_it(mxfp4_checkpoint, tmp_path: Path) -> None:
    source, target = mxfp4_checkpoint(lossy=True), tmp_path / "out"
    report = convert(source, target, on_loss="mxfp8")
    before, after = tensors(source), tensors(target)
    for name in (n for n, t in before.items() if t.dtype == torch.int8):
        scale = name[:-6] + "scale"
        assert torch.equal(decode_result(after[name], after[scale]), decode_source(before[name], before[scale])), name
    assert torch.equal(after[LOSSY[:-6] + "scale"].view(torch.uint8), before[LOSSY[:-6] + "scale"].view(torch.uint8))
    found = contract.read(target)
    assert found.lossless
    assert found.exceptions == {LOSSY: "mxfp8 1x32"}
    assert [t["name"] for t in report["tensors"] if t["action"] == "mxfp8"] == [LOSSY]


def test_on_loss_report_converts_and_says_what_it_lost(mxfp4_checkpoint, tmp_path: Path) -> None:
    source, target = mxfp4_checkpoint(lossy=True), tmp_path / "out"
    report = convert(source, target, on_loss="report")
    before, after = tensors(source), tensors(target)
    error = decode_result(after[LOSSY], after[LOSSY[:-6] + "scale"]) - decode_source(
        before[LOSSY], before[LOSSY[:-6] + "scale"]
    )
    (entry,) = [t for t in report["tensors"] if t["name"] == LOSSY]
    assert entry["lossy_tiles"] == 1
    assert entry["lossy_elements"] == int((error != 0).sum()) == 32
    assert entry["max_abs_error"] == float(error.abs().max())
    assert contract.read(target).lossless is False


def test_nan_scale_is_an_error_with_tile_before_any_write(mxfp4_checkpoint, tmp_path: Path) -> None:
    source = mxfp4_checkpoint()
    shard = source / "model-1.safetensors"
    changed = load_file(shard)
    name = "model.layers.0.mlp.experts.0.gate_proj.scale"
    changed[name].view(torch.uint8)[130, 4] = 255
    save_file(changed, shard, metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=rf"{name}: scale code 255 \(NaN\) at \[130, 4\], tile \[1, 1\]"):
        convert(source, tmp_path / "out", on_loss="report")
    assert not (tmp_path / "out").exists()


def test_header_faults_are_all_listed_before_any_write(tmp_path: Path) -> None:
    source = tmp_path / "bad"
    source.mkdir()
    u8 = torch.uint8
    save_file(
        {
            "a.weight": torch.zeros(4, 16, dtype=u8), "b.weight": torch.zeros(4, 24, dtype=u8), "b.scale": torch.zeros(4, 1, dtype=u8),
            "c.weight": torch.zeros(4, 32, dtype=u8), "c.scale": torch.zeros(4, 1, dtype=u8), "d.scale": torch.zeros(4, 1, dtype=u8),
            "e.weight": torch.zeros(4, 32, dtype=u8), "e.scale": torch.zeros(4, 2),
        },
        source / "model.safetensors",
    )  # fmt: skip
    with pytest.raises(ConversionError) as error:
        convert(source, tmp_path / "out")
    for line in (
        "a.weight: needs exactly one scale", "b.weight: shape [4, 24] is not [out, in/2]", "c.scale: shape [4, 1], c.weight needs [4, 2]",
        "d.scale: stray scale, d.weight is not in the checkpoint", "e.scale: dtype F32",
    ):  # fmt: skip
        assert line in str(error.value)


def test_a_checkpoint_without_fp4_is_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match="no FP4 weight"):
        convert(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("damage", ["truncated", "missing shard", "no header"])
def test_damaged_sources_name_the_file(damage: str, mxfp4_checkpoint, tmp_path: Path) -> None:
    source = mxfp4_checkpoint()
    shard = source / "model-1.safetensors"
    if damage == "missing shard":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-7] if damage == "truncated" else b"\xff" * 100)
    with pytest.raises(ConversionError, match=r"model-1\.safetensors"):
        convert(source, tmp_path / "out")


def test_targets_that_hold_something_else_are_refused(mxfp4_checkpoint, tmp_path: Path) -> None:
    source, target = mxfp4_checkpoint(), tmp_path / "out"
    target.mkdir()
    (target / "file").write_text("x")
    with pytest.raises(ConversionError, match="is not empty; use --resume"):
        convert(source, target)
    shutil.rmtree(target)
    convert(source, target)
    with pytest.raises(ConversionError, match="is COMPLETE already"):
        convert(source, target)


def test_resume_with_other_options_or_another_source_is_refused(mxfp4_checkpoint, tmp_path: Path) -> None:
    source, target = mxfp4_checkpoint(lossy=True), tmp_path / "out"
    convert(source, target, on_loss="report")
    (target / "COMPLETE").unlink()
    with pytest.raises(ConversionError, match="cannot resume, contract, options differ"):
        convert(source, target, on_loss="mxfp8", resume=True)
    other = mxfp4_checkpoint(lossy=True, n=192, name="other")
    with pytest.raises(ConversionError, match=r"cannot resume, .*input"):
        convert(other, target, on_loss="report", resume=True)


def test_resume_notices_other_weights_of_the_same_shapes(mxfp4_checkpoint, tmp_path: Path) -> None:
    source, target = mxfp4_checkpoint(), tmp_path / "out"
    convert(source, target)
    (target / "COMPLETE").unlink()
    changed = load_file(source / "model-0.safetensors")
    next(t for t in changed.values() if t.dtype == torch.int8).zero_()
    save_file(changed, source / "model-0.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"cannot resume, .*input"):
        convert(source, target, resume=True)


def test_the_command_line_says_what_it_did(mxfp4_checkpoint, tmp_path: Path) -> None:
    source = mxfp4_checkpoint(lossy=True)
    done = CliRunner().invoke(convert_app, ["mxfp4-to-fp8", str(source), str(tmp_path / "out"), "--on-loss", "report"])
    assert done.exit_code == 0, done.output
    assert "9 tensors converted, 1 of 36 tiles lossy" in done.output
    failed = CliRunner().invoke(convert_app, ["mxfp4-to-fp8", str(source), str(tmp_path / "out2")])
    assert isinstance(failed.exception, ConversionError)

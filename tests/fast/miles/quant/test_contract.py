"""The contract: every field that must agree is compared, legacy checkpoints are refused, tampering is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.quant import contract
from miles.quant.config import NVFP4Options, QuantConfig
from miles.quant.contract import FourOverSix, nvfp4_contract
from miles.quant.errors import ContractMismatch, ConversionError, QuantConfigError
from miles.quant.export import export_nvfp4
from miles.quant.hook import FakeQATHook

CONFIG = NVFP4QDQConfig(True, error_mode=ErrorMode.MSE, error_use_fast_math=True)
NAMES = ("a.mlp.experts.0.gate_proj.weight", "a.mlp.experts.0.up_proj.weight")


def make() -> contract.QuantContract:
    return nvfp4_contract(CONFIG, NAMES, source_digest="s", producer={"conversion": "test"}, ignore=("a.",))


CHANGES = {
    "format": "mxfp4",
    "block": (1, 32),
    "scale_dtype": "e8m0",
    "decode": "stored",
    "scope_digest": "other",
    "gate_up_shared": False,
    "ignore": ("b.",),
}


@pytest.mark.parametrize("field", list(CHANGES))
def test_contract_mismatch_names_field_and_both_values(field: str) -> None:
    mine = make()
    other = mine.model_copy(update={field: CHANGES[field]})
    with pytest.raises(ContractMismatch) as error:
        contract.require_equal(mine, other, where="engine launch")
    text = str(error.value)
    assert text.startswith("engine launch: quantisation contracts differ in ")
    assert f"{field}: expected {getattr(mine, field)!r}, found {getattr(other, field)!r}" in text


@pytest.mark.parametrize(
    ("field", "value"), [("on", False), ("e4m3_max", 256), ("error_mode", "MAE"), ("domain", "exact")]
)
def test_contract_mismatch_inside_4over6(field: str, value) -> None:
    mine = make()
    other = mine.model_copy(update={"four_over_six": mine.four_over_six.model_copy(update={field: value})})
    with pytest.raises(ContractMismatch, match=rf"four_over_six\.{field}: expected .*, found {value!r}"):
        contract.require_equal(mine, other, where="export")


def test_every_compared_field_has_a_case() -> None:
    assert set(contract.COMPARED) == {*CHANGES, "four_over_six"}
    assert set(FourOverSix.model_fields) == {"on", "e4m3_max", "error_mode", "domain"}


def test_source_and_producer_may_differ() -> None:
    other = make().model_copy(update={"source_digest": "t", "producer": {"conversion": "trainer"}})
    contract.require_equal(make(), other, where="x")


def test_a_scope_difference_shows_a_tensor() -> None:
    other = nvfp4_contract(CONFIG, NAMES[:1], source_digest="s", producer={}, ignore=("a.",))
    with pytest.raises(ContractMismatch, match=r"for example a\.mlp\.experts\.0\.up_proj\.weight"):
        contract.require_equal(make(), other, where="x")


def test_written_contract_reads_back_equal_with_its_rounding(tmp_path: Path) -> None:
    digest = contract.write(tmp_path, make())
    assert contract.read(tmp_path) == make()
    assert contract.read(tmp_path).digest() == digest
    assert contract.read(tmp_path).nvfp4() == CONFIG


def test_a_changed_contract_no_longer_fits_the_config(tmp_path: Path) -> None:
    digest = contract.write(tmp_path, make())
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {contract.DIGEST_KEY: digest}}))
    contract.read(tmp_path)
    path = tmp_path / contract.FILE
    path.write_text(path.read_text().replace('"MSE"', '"MAE"'))
    with pytest.raises(ContractMismatch, match="quantization_contract_digest"):
        contract.read(tmp_path)


def test_legacy_refused(tmp_path: Path) -> None:
    save_file({"a.mlp.experts.0.up_proj.weight_scale": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(QuantConfigError, match=r"miles convert requantise.*--accept-legacy"):
        contract.read(tmp_path)
    with pytest.raises(QuantConfigError, match="missing: block, scale_dtype, decode"):
        contract.read(tmp_path, legacy={"format": "nvfp4", "four_over_six": {}, "tensors": [], "gate_up_shared": True})
    stated = make().model_dump(mode="json", exclude={"scope_digest", "source_digest", "producer", "lossless"})
    contract.require_equal(make(), contract.read(tmp_path, legacy=stated), where="launch")


def test_quantised_shared_experts_are_refused_even_with_a_contract(tmp_path: Path) -> None:
    contract.write(tmp_path, make())
    save_file({"a.mlp.shared_experts.up_proj.weight_scale": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(QuantConfigError, match="shared experts are quantised"):
        contract.read(tmp_path)


def stream() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [
        ("a.mlp.experts.0.gate_proj.weight", torch.randn(32, 48).to(torch.bfloat16)),
        ("a.mlp.shared_expert.gate_proj.weight", torch.randn(32, 48).to(torch.bfloat16)),
        ("a.mlp.experts.0.up_proj.weight", torch.randn(32, 48).to(torch.bfloat16)),
        ("lm_head.weight", torch.randn(16, 48).to(torch.bfloat16)),
    ]


def test_live_export_writes_the_contract_and_what_the_converter_would(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from miles.quant.convert import bf16

    found = export_nvfp4(stream(), tmp_path / "live", CONFIG, model_config={"a": 1}, shard_bytes=3000)
    assert contract.read(tmp_path / "live") == found
    assert len(list((tmp_path / "live").glob("*.safetensors"))) > 1
    live = {k: v for p in (tmp_path / "live").glob("*.safetensors") for k, v in load_file(p).items()}
    (tmp_path / "source").mkdir()
    save_file(dict(stream()), tmp_path / "source" / "model.safetensors")
    bf16.to_nvfp4(tmp_path / "source", tmp_path / "converted", config=CONFIG)
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert set(converted) - set(live) == {n for n in converted if n.endswith("input_scale")}
    assert all(torch.equal(live[n].view(torch.uint8), converted[n].view(torch.uint8)) for n in live)
    contract.require_equal(found, contract.read(tmp_path / "converted"), where="x")
    config = json.loads((tmp_path / "live" / "config.json").read_text())
    assert config["quantization_config"]["exclude_modules"] == ["a.mlp.shared_expert.", "lm_head."]


def test_live_export_against_another_contract_is_not_complete(tmp_path: Path) -> None:
    with pytest.raises(ContractMismatch, match=r"export to .*ignore: expected \('a\.',\), found \(\)"):
        export_nvfp4(stream(), tmp_path / "live", CONFIG, model_config={}, expected=make())
    assert not (tmp_path / "live" / "COMPLETE").exists()
    with pytest.raises(ConversionError, match="not empty"):
        export_nvfp4(stream(), tmp_path / "live", CONFIG, model_config={})


def test_fake_quantisation_and_engine_start_refuse_a_checkpoint_of_another_rounding(tmp_path: Path) -> None:
    save_file(dict(stream()), tmp_path / "model.safetensors")
    assert contract.check_rounding(tmp_path, CONFIG, where="engine launch") is None
    contract.write(tmp_path, make())
    assert contract.check_rounding(tmp_path, CONFIG, where="engine launch") == make()
    options = NVFP4Options(use_4over6=True, error_mode="MAE", error_use_fast_math=True)
    with pytest.raises(
        ContractMismatch, match=r"start of fake quantisation: .*error_mode: expected 'MAE', found 'MSE'"
    ):
        FakeQATHook(QuantConfig(fake_qat="nvfp4", nvfp4=options), environ={}, model_dir=tmp_path)

"""The contract: every field that must agree is compared, legacy checkpoints are refused, tampering is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.quant import contract
from miles.quant.config import NVFP4Options, QuantConfig
from miles.quant.contract import FourOverSix, nvfp4_contract
from miles.quant.convert import bf16_to_fp8, to_nvfp4
from miles.quant.errors import ContractMismatch, ConversionError, QuantConfigError
from miles.quant.export import export_nvfp4
from miles.quant.hook import FakeQATHook

CONFIG = NVFP4QDQConfig(True, error_mode=ErrorMode.MSE, error_use_fast_math=True)
NAMES = ("a.mlp.experts.0.gate_proj.weight", "a.mlp.experts.0.up_proj.weight")


def make(**changes) -> contract.QuantContract:
    return nvfp4_contract(CONFIG, NAMES, source_digest="s", producer={"conversion": "test"}, ignore=("b.",), **changes)


CHANGES = {
    "exceptions": {"a.weight": "mxfp8 1x32"},
    "format": "mxfp4",
    "block": (1, 32),
    "scale_dtype": "e8m0",
    "decode": "stored",
    "scope_digest": "other",
    "gate_up_shared": False,
    "ignore": ("c.",),
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
    other = nvfp4_contract(CONFIG, NAMES[:1], source_digest="s", producer={}, ignore=("b.",))
    with pytest.raises(ContractMismatch, match=r"for example a\.mlp\.experts\.0\.up_proj\.weight"):
        contract.require_equal(make(), other, where="x")


def test_written_contract_reads_back_equal_with_its_rounding(tmp_path: Path) -> None:
    mine = make(weights="masters")
    digest = contract.write(tmp_path, mine)
    assert contract.read(tmp_path) == mine
    assert contract.read(tmp_path).digest() == digest
    assert contract.read(tmp_path).nvfp4() == CONFIG


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A packed checkpoint of two shards."""
    export_nvfp4(stream(), tmp_path / "stored", CONFIG, model_config={"a": 1}, shard_bytes=3000)
    return tmp_path / "stored"


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def test_the_digest_is_repeated_in_config_and_every_shard(stored: Path) -> None:
    digest = contract.read(stored).digest()
    assert len(shards(stored)) > 1
    for path in shards(stored):
        with safe_open(path, "pt") as f:
            assert f.metadata() == {"format": "pt", contract.DIGEST_KEY: digest}
    config = json.loads((stored / "config.json").read_text())
    assert config["quantization_config"][contract.DIGEST_KEY] == digest
    assert (stored / "COMPLETE").read_text().strip() == digest


def test_a_changed_contract_no_longer_fits_the_files(stored: Path) -> None:
    path = stored / contract.FILE
    path.write_text(path.read_text().replace('"MSE"', '"MAE"'))
    with pytest.raises(
        ContractMismatch, match=r"quantization_contract_digest is [0-9a-f]{64}, .* not\s+written together"
    ):
        contract.read(stored)


def test_a_shard_of_another_conversion_is_noticed(stored: Path, tmp_path: Path) -> None:
    other = NVFP4QDQConfig(True, error_mode=ErrorMode.MAE, error_use_fast_math=True)
    export_nvfp4(stream(), tmp_path / "other", other, model_config={"a": 1}, shard_bytes=3000)
    shards(stored)[1].write_bytes(shards(tmp_path / "other")[1].read_bytes())
    with pytest.raises(ContractMismatch, match=rf"{shards(stored)[1].name}: quantization_contract_digest is"):
        contract.read(stored)


def test_a_shard_without_a_digest_is_noticed(stored: Path) -> None:
    save_file(load_file(shards(stored)[0]), shards(stored)[0], metadata={"format": "pt"})
    with pytest.raises(ContractMismatch, match="quantization_contract_digest is missing"):
        contract.read(stored)


def test_tensors_that_no_shard_holds_are_noticed(stored: Path) -> None:
    index = stored / "model.safetensors.index.json"
    (stored / json.loads(index.read_text())["weight_map"][NAMES[0]]).unlink()
    index.unlink()
    with pytest.raises(ContractMismatch, match="tensors that no shard holds"):
        contract.read(stored)


def test_legacy_refused(tmp_path: Path) -> None:
    packed = {name: torch.zeros(4, 8, dtype=torch.uint8) for name in NAMES}
    save_file({**packed, "a.mlp.experts.0.up_proj.weight_scale": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(QuantConfigError, match=r"miles convert requantise.*--accept-legacy"):
        contract.read(tmp_path)
    with pytest.raises(QuantConfigError, match="missing: block, scale_dtype, decode"):
        contract.read(tmp_path, legacy={"format": "nvfp4", "four_over_six": {}, "tensors": [], "gate_up_shared": True})
    stated = make().model_dump(mode="json", exclude={"scope_digest", "source_digest", "producer", "lossless"})
    contract.require_equal(make(), contract.read(tmp_path, legacy=stated), where="launch")
    with pytest.raises(
        ContractMismatch, match=r"--accept-legacy: lists 1 tensors that no shard holds: no\.such\.tensor"
    ):
        contract.read(tmp_path, legacy={**stated, "tensors": ["no.such.tensor"]})
    for wrong in (5, [5], None, "a", ["\ud800"]):
        with pytest.raises(QuantConfigError, match=r"--accept-legacy is no quantisation contract: (tensors|file)"):
            contract.read(tmp_path, legacy={**stated, "tensors": wrong})


def test_stated_fields_beside_a_contract_are_refused(stored: Path) -> None:
    with pytest.raises(QuantConfigError, match="--accept-legacy is for checkpoints without it, leave the option out"):
        contract.read(stored, legacy={})


def test_reading_a_folder_that_is_none_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="nowhere: no such folder; give a checkpoint folder"):
        contract.read(tmp_path / "nowhere")
    with pytest.raises(ConversionError, match="no safetensors file; give a checkpoint folder"):
        contract.read(tmp_path)


def test_a_contract_that_is_no_text_or_no_file_is_named(stored: Path) -> None:
    path = stored / contract.FILE
    path.write_bytes(b"\xff{")
    with pytest.raises(QuantConfigError, match=rf"{path} is no quantisation contract"):
        contract.read(stored)
    path.unlink()
    path.mkdir()
    with pytest.raises(QuantConfigError, match=rf"{path}: cannot be read: Is a directory"):
        contract.read(stored)


@pytest.mark.parametrize("value", [[], 5, "fp8"])
def test_a_quantization_config_that_is_no_object_is_named(value: object, stored: Path) -> None:
    (stored / "config.json").write_text(json.dumps({"quantization_config": value}))
    with pytest.raises(
        ConversionError, match=rf"config\.json: quantization_config is a {type(value).__name__}, a JSON object"
    ):
        contract.read(stored)


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
    found = export_nvfp4(stream(), tmp_path / "live", CONFIG, model_config={"a": 1}, shard_bytes=3000)
    assert contract.read(tmp_path / "live") == found
    assert len(list((tmp_path / "live").glob("*.safetensors"))) > 1
    live = {k: v for p in (tmp_path / "live").glob("*.safetensors") for k, v in load_file(p).items()}
    (tmp_path / "source").mkdir()
    save_file(dict(stream()), tmp_path / "source" / "model.safetensors")
    to_nvfp4.convert(tmp_path / "source", tmp_path / "converted", config=CONFIG)
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert set(converted) - set(live) == {n for n in converted if n.endswith("input_scale")}
    assert all(torch.equal(live[n].view(torch.uint8), converted[n].view(torch.uint8)) for n in live)
    contract.require_equal(found, contract.read(tmp_path / "converted"), where="x")
    config = json.loads((tmp_path / "live" / "config.json").read_text())
    for key in ("ignore", "exclude_modules"):
        assert config["quantization_config"][key] == ["a.mlp.shared_expert.gate_proj", "lm_head"]


def test_live_export_against_another_contract_is_not_complete(tmp_path: Path) -> None:
    with pytest.raises(ContractMismatch, match=r"export to .*ignore: expected \('b\.',\), found \(\)"):
        export_nvfp4(stream(), tmp_path / "live", CONFIG, model_config={}, expected=make())
    assert not (tmp_path / "live" / "COMPLETE").exists()
    assert not list((tmp_path / "live").iterdir())


def test_live_export_names_what_is_in_its_way(tmp_path: Path) -> None:
    export_nvfp4(stream(), tmp_path / "live", CONFIG, model_config={})
    with pytest.raises(ConversionError, match="live is not empty; export into another directory"):
        export_nvfp4(stream(), tmp_path / "live", CONFIG, model_config={})
    with pytest.raises(ConversionError, match=r"export to .*half without its partner: .*gate_proj"):
        export_nvfp4(stream()[:1], tmp_path / "half", CONFIG, model_config={})
    with pytest.raises(ConversionError, match="no routed-expert weight to quantise"):
        export_nvfp4(stream()[3:], tmp_path / "none", CONFIG, model_config={})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match=r"a part of this path is a file.*nothing was published"):
        export_nvfp4(stream(), tmp_path / "file" / "live", CONFIG, model_config={})


def masters(directory: Path) -> Path:
    """What a trainer with fake quantisation exports: unquantised weights, and how they must be rounded."""
    directory.mkdir()
    save_file(dict(stream()), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    contract.write(directory, nvfp4_contract(CONFIG, NAMES, source_digest="s", producer={}, weights="masters"))
    return directory


def test_plain_weights_need_no_contract(tmp_path: Path) -> None:
    save_file(dict(stream()), tmp_path / "model.safetensors")
    assert contract.check_rounding(tmp_path, CONFIG, where="engine launch") is None


def test_fake_quantisation_and_engine_start_refuse_a_checkpoint_of_another_rounding(tmp_path: Path) -> None:
    trained = masters(tmp_path / "trained")
    assert contract.check_rounding(trained, CONFIG, where="engine launch") == contract.read(trained)
    options = NVFP4Options(use_4over6=True, error_mode="MAE", error_use_fast_math=True)
    with pytest.raises(
        ContractMismatch, match=r"start of fake quantisation: .*error_mode: expected 'MAE', found 'MSE'"
    ):
        FakeQATHook(QuantConfig(fake_qat="nvfp4", nvfp4=options), environ={}, model_dir=trained)


def test_fake_quantisation_refuses_a_checkpoint_of_another_scope(tmp_path: Path) -> None:
    trained = masters(tmp_path / "trained")
    more = {**dict(stream()), "a.mlp.experts.1.down_proj.weight": torch.randn(32, 48)}
    save_file(more, trained / "model.safetensors")
    options = {"use_4over6": True, "error_mode": "MSE", "error_use_fast_math": True}
    with pytest.raises(
        ContractMismatch, match=r"scope_digest: .* \(for example a\.mlp\.experts\.1\.down_proj\.weight\)"
    ):
        FakeQATHook(QuantConfig(fake_qat="nvfp4", nvfp4=NVFP4Options(**options)), environ={}, model_dir=trained)
    options["ignore"] = ("a.mlp.experts.1.",)
    with pytest.raises(ContractMismatch, match=r"ignore: expected \('a\.mlp\.experts\.1\.',\), found \(\)"):
        FakeQATHook(QuantConfig(fake_qat="nvfp4", nvfp4=NVFP4Options(**options)), environ={}, model_dir=trained)


def test_trainer_and_engine_without_rounding_refuse_a_model_that_was_trained_with_it(tmp_path: Path) -> None:
    trained = masters(tmp_path / "trained")
    with pytest.raises(
        ContractMismatch, match=r"engine launch: .*trained with nvfp4 rounding, this run has none; give quant"
    ):
        contract.check_rounding(trained, None, where="engine launch")
    with pytest.raises(ContractMismatch, match=r"start of training: .*or remove that file to go on without"):
        FakeQATHook(QuantConfig(), environ={}, model_dir=trained)
    (trained / contract.FILE).unlink()
    assert FakeQATHook(QuantConfig(), environ={}, model_dir=trained).rounding is None


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["four_over_six"].update(error_mode="MAE"),
        lambda values: values.update(tensors=[]),
        lambda values: values.update(scope_digest="x"),
        lambda values: values.update(weights="stored"),
        lambda values: values.pop(contract.DIGEST_KEY),
    ],
)
def test_a_changed_contract_of_unquantised_weights_is_noticed(change, tmp_path: Path) -> None:
    path = masters(tmp_path / "trained") / contract.FILE
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ContractMismatch, match=r"quantization_contract_digest is .*(copy the model|checkpoint) again"):
        contract.read(tmp_path / "trained")


def test_unquantised_weights_that_their_contract_lists_must_be_there(tmp_path: Path) -> None:
    trained = masters(tmp_path / "trained")
    save_file({"lm_head.weight": torch.zeros(2, 2)}, trained / "model.safetensors")
    with pytest.raises(ContractMismatch, match="lists 2 tensors that no shard holds"):
        contract.read(trained)


def test_a_scope_digest_of_other_tensors_is_noticed(tmp_path: Path) -> None:
    contract.write(tmp_path, make(weights="masters").model_copy(update={"scope_digest": "x"}))
    with pytest.raises(ContractMismatch, match="scope_digest is x, its tensors give"):
        contract.read(tmp_path)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a.mlp.experts.down_proj": torch.zeros(2, 4, 8, dtype=torch.uint8)},
        {"a.mlp.experts.0.down_proj.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn)},
        {
            "a.mlp.experts.0.down_proj.weight": torch.zeros(4, 8),
            "a.mlp.experts.0.down_proj.weight_scale": torch.ones(1),
        },
    ],
)
def test_quantised_weights_without_a_contract_are_known_by_dtype_or_scale(tensors: dict, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(QuantConfigError, match=rf"holds quantised weights \({next(iter(tensors))}\) but no"):
        contract.check_rounding(tmp_path, CONFIG, where="engine launch")


def test_packed_weights_are_no_start_for_trainer_or_engine(stored: Path) -> None:
    with pytest.raises(QuantConfigError, match="are packed nvfp4, trainer and engine pack unquantised weights"):
        contract.check_rounding(stored, CONFIG, where="engine launch")
    (stored / contract.FILE).unlink()
    with pytest.raises(QuantConfigError, match=r"holds quantised weights .* but no .*miles convert requantise"):
        contract.check_rounding(stored, CONFIG, where="engine launch")


def test_a_trained_model_is_converted_with_the_rounding_it_was_trained_with(tmp_path: Path) -> None:
    trained = masters(tmp_path / "trained")
    with pytest.raises(ContractMismatch, match=r"four_over_six\.on: expected True, found False"):
        to_nvfp4.convert(trained, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    to_nvfp4.convert(trained, tmp_path / "packed", config=CONFIG)
    assert contract.read(tmp_path / "packed").weights == "stored"


def test_a_contract_for_fp8_may_list_shared_experts(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file(dict(stream()), tmp_path / "source" / "model.safetensors")
    bf16_to_fp8.convert(tmp_path / "source", tmp_path / "fp8")
    assert "a.mlp.shared_expert.gate_proj.weight" in contract.read(tmp_path / "fp8").tensors


def test_a_checkpoint_goes_on_with_the_rounding_it_was_trained_with() -> None:
    mine = make(weights="masters")
    saved = mine.model_dump(mode="json")
    contract.require_resumed(None, None, where="iter_5")
    contract.require_resumed(mine, saved, where="iter_5")
    with pytest.raises(ContractMismatch, match="iter_5 was trained with fake quantisation, this run is without"):
        contract.require_resumed(None, saved, where="iter_5")
    with pytest.raises(ContractMismatch, match="iter_5 was trained without fake quantisation, this run is with"):
        contract.require_resumed(mine, None, where="iter_5")
    other = mine.model_copy(update={"decode": "stored"})
    with pytest.raises(ContractMismatch, match=r"resume from iter_5: .*decode: expected 'te', found 'stored'"):
        contract.require_resumed(other, saved, where="iter_5")

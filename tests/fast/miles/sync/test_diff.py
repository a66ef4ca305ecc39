import pytest
import torch
from safetensors.torch import save_file
from sync_engines import zeros_like
from typer.testing import CliRunner

from miles.cli import app
from miles.config import ConfigError
from miles.sync.diff import diff_engine
from miles.weight_wire.table import EngineTable, ParamEntry


def test_diff_names_the_destinations_that_are_not_the_checkpoints(start_engine, pusher_for, tiny_weights, tmp_path):
    save_file(tiny_weights, tmp_path / "model.safetensors")
    engine = start_engine(zeros_like(tiny_weights))
    before = diff_engine(engine.url, tmp_path)
    assert (before.version, before.equal, len(before.differing)) == ("0", 0, len(tiny_weights))
    pusher_for(engine).push(tiny_weights.items(), 4)
    after = diff_engine(engine.url, tmp_path)
    assert (after.version, after.state, after.equal, after.differing) == ("4", "serving", len(tiny_weights), ())
    engine.parameters["model.norm.weight"][5] += 1e-6
    assert diff_engine(engine.url, tmp_path).differing == ("model.norm.weight",)


def test_diff_builds_fused_and_quantised_destinations_as_a_sync_does(start_engine, pusher_for, tmp_path):
    entries = (
        ParamEntry("qk", (6, 4), "bfloat16", fused_from=("q", "k"), num_shards=2),
        ParamEntry("w", (8, 64), "float8_e4m3fn", scale="mx32_e8m0", scale_name="w_scale"),
        ParamEntry("w_scale", (8, 2), "uint8"),
    )
    weights = {"q": torch.randn(4, 4), "k": torch.randn(2, 4), "w": torch.randn(8, 64)}
    save_file(weights, tmp_path / "model.safetensors")
    parameters = {e.name: torch.zeros(e.shape, dtype=getattr(torch, e.dtype)) for e in entries}
    engine = start_engine(parameters, table=EngineTable(entries=entries))
    pusher_for(engine).push(weights.items(), 1)
    assert diff_engine(engine.url, tmp_path).differing == ()
    parameters["w_scale"][0, 0] += 1
    assert diff_engine(engine.url, tmp_path).differing == ("w_scale",)


def test_diff_against_a_folder_without_weights(start_engine, tiny_weights, tmp_path):
    engine = start_engine(zeros_like(tiny_weights))
    with pytest.raises(ConfigError, match="holds no safetensors files"):
        diff_engine(engine.url, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="cannot be read as a checkpoint"):
        diff_engine(engine.url, tmp_path)


def test_the_command_prints_what_differs_and_fails_for_it(start_engine, pusher_for, tiny_weights, tmp_path):
    save_file(tiny_weights, tmp_path / "model.safetensors")
    engine = start_engine(zeros_like(tiny_weights))
    pusher_for(engine).push(tiny_weights.items(), 4)
    command = ["sync", "diff", engine.url, "--checkpoint", str(tmp_path)]
    same = CliRunner().invoke(app, command)
    assert (same.exit_code, same.output) == (
        0, f"{engine.url}: version 4 (serving), {len(tiny_weights)} equal, 0 differ\n"
    )  # fmt: skip
    engine.parameters["model.norm.weight"][5] += 1e-6
    other = CliRunner().invoke(app, command)
    assert other.exit_code == 1
    assert other.output.splitlines()[1:] == ["model.norm.weight"]

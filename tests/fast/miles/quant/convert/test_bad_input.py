"""What a new user may type wrongly: every subcommand ends with exit code 2 and says where and what to do."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles import cli

UP = "model.layers.0.mlp.experts.0.up_proj.weight"
GATE = "model.layers.0.mlp.experts.0.gate_proj.weight"
DOWN = "model.layers.0.mlp.experts.0.down_proj.weight"
COMMANDS = ("mxfp4-to-fp8", "bf16-to-nvfp4", "bf16-to-fp8", "fp8-to-mxfp8", "requantise")


def write(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    return directory


def good_source(command: str, directory: Path) -> Path:
    """A tiny checkpoint that `command` converts."""
    torch.manual_seed(0)
    bf16 = {name: torch.randn(32, 64).to(torch.bfloat16) for name in (GATE, UP, DOWN)}
    if command == "mxfp4-to-fp8":
        scales = {n[:-6] + "scale": torch.full((32, 4), 120, dtype=torch.uint8) for n in bf16}
        return write(directory, {n: torch.randint(0, 255, (32, 64), dtype=torch.uint8) for n in bf16} | scales)
    if command == "fp8-to-mxfp8":
        scales = {n + "_scale_inv": torch.full((1, 1), 0.5) for n in bf16}
        return write(directory, {n: t.to(torch.float8_e4m3fn) for n, t in bf16.items()} | scales)
    return write(directory, bf16)


@pytest.fixture
def miles(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """`miles convert ...` as typed: (exit code, what it printed as an error)."""

    def run(*words: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["miles", "convert", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


def change(source: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = dict(load_file(source / "model.safetensors"))
    edit(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def truncate(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def damage_header(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"data_offsets", b"data_offsats"))


def lengthen(source: Path) -> None:
    with open(source / "model.safetensors", "ab") as f:
        f.write(b"more")


def lose_shard(source: Path) -> None:
    index = {"weight_map": {UP: "model-2.safetensors", GATE: "model.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def lie_in_index(source: Path) -> None:
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"other": "model.safetensors"}}))


DAMAGES = {
    "truncated shard": (truncate, "model.safetensors: truncated", "copy or download the file again"),
    "damaged header": (damage_header, "model.safetensors: not a safetensors file", "copy or download the file again"),
    "bytes at the end": (lengthen, "model.safetensors: longer than its header says", "copy or download the file again"),
    "missing shard": (lose_shard, "model-2.safetensors: named in", "copy or download the file again"),
    "index names another place": (lie_in_index, "index.json: not in the shard it names: other", "copy or download"),
    "index is no JSON": (
        lambda s: (s / "model.safetensors.index.json").write_text("{"),
        "model.safetensors.index.json: not JSON", "copy or download the file again",
    ),
    "config is no JSON": (lambda s: (s / "config.json").write_text("[1"), "config.json: not JSON", "copy or download"),
    "no safetensors file": (
        lambda s: (s / "model.safetensors").unlink(), "no safetensors file", "give a checkpoint folder with *.safetensors",
    ),
    "wrong dtype": (
        lambda s: change(s, lambda t: [t.update({n: torch.zeros(32, 64, dtype=torch.int32)}) for n in (GATE, UP, DOWN)]),
        "cannot be converted", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_source_is_named_and_nothing_is_written(command: str, damage: str, miles, tmp_path: Path) -> None:
    break_it, place, fix = DAMAGES[damage]
    source = good_source(command, tmp_path / "source")
    break_it(source)
    code, error = miles(command, source, tmp_path / "out")
    assert code == 2, error
    assert place in error
    assert str(source) in error
    assert fix in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "where", ["absolute", "../source/model.safetensors", "config.json", "journal.jsonl", "\ud800.safetensors"]
)
def test_an_index_that_leads_out_of_the_source_is_refused(command: str, where: str, miles, tmp_path: Path) -> None:
    source = good_source(command, tmp_path / "source")
    before = (source / "model.safetensors").read_bytes()
    shard = str(source / "model.safetensors") if where == "absolute" else where
    index = {"weight_map": dict.fromkeys(load_file(source / "model.safetensors"), shard)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    code, error = miles(command, source, tmp_path / "out")
    assert code == 2, error
    assert f"index.json: weight_map names {shard!a}, which is not the plain name" in error
    assert (source / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_sources_and_targets_of_the_wrong_kind_are_refused(command: str, miles, tmp_path: Path) -> None:
    source, target = good_source(command, tmp_path / "source"), tmp_path / "out"
    code, error = miles(command, tmp_path / "nowhere", target)
    assert (code, "nowhere: no such folder; give a checkpoint folder" in error) == (2, True), error
    code, error = miles(command, source / "model.safetensors", target)
    assert (code, "model.safetensors is a file; give the checkpoint folder" in error) == (2, True), error
    code, error = miles(command, source, source)
    assert (code, "is the source itself; choose another directory" in error) == (2, True), error
    code, error = miles(command, source, source / "config.json")
    assert (code, "config.json is a file; choose a directory" in error) == (2, True), error
    code, error = miles(command, source, source / "config.json" / "out")
    assert (code, "a part of this path is a file; choose another folder" in error) == (2, True), error
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    code, error = miles(command, source, target)
    assert (code, "is not empty; use --resume" in error) == (2, True), error
    code, error = miles(command, source, target, "--resume")
    assert (code, "it is no interrupted conversion; choose another directory" in error) == (2, True), error
    assert [p.name for p in target.iterdir()] == ["notes.txt"]
    assert miles(command, source, tmp_path / "done")[0] == 0
    code, error = miles(command, source, tmp_path / "done")
    assert (code, "is COMPLETE already; choose another directory" in error) == (2, True), error


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_leaves_nothing_final_and_says_how_to_go_on(command: str, tmp_path: Path) -> None:
    source, target, said = good_source(command, tmp_path / "source"), tmp_path / "out", tmp_path / "said"
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            with open(said, "w", buffering=1) as file:
                sys.stderr = file
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
                sys.argv = ["miles", "convert", command, str(source), str(target)]
                cli.main()
        except SystemExit as ended:
            os._exit(int(ended.code or 0))
        finally:
            os._exit(99)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert "the limit on file sizes is reached (ulimit -f); raise it" in said.read_text()
    assert "run again with --resume" in said.read_text()
    assert [p.name for p in target.iterdir()] == ["journal.jsonl"]


def test_an_interrupt_says_how_to_go_on(miles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("miles.quant.convert.mxfp4_to_fp8.convert", interrupted)
    code, error = miles("mxfp4-to-fp8", tmp_path, tmp_path / "out")
    assert (code, "run the same command with --resume" in error) == (130, True)


OPTIONS = {
    ("bf16-to-nvfp4", "--ignore", "re:("): ("--ignore: ignore entry 're:('", "no regular expression"),
    ("bf16-to-nvfp4", "--ignore", "model.layers.0"): ("--ignore model.layers.0: no tensor", "a prefix ending in a dot"),
    ("requantise", "--ignore", "model.layer.0."): ("--ignore model.layer.0.: no tensor", "a prefix ending in a dot"),
    ("bf16-to-nvfp4", "--ignore", UP): ("half is missing", UP),
    ("bf16-to-nvfp4", "--bf16-first-layers", "2"): ("--bf16-first-layers", "do not fit in 1 decoder layers"),
    ("bf16-to-nvfp4", "--e4m3-max", "256"): ("--e4m3-max", "needs use_4over6"),
    ("bf16-to-nvfp4", "--error-mode", "MSE"): ("--error-mode MSE", "needs --4over6"),
    ("requantise", "--fp16-domain"): ("--fp16-domain", "needs use_4over6"),
    ("bf16-to-fp8", "--scale", "int8"): ("--scale", "fp32"),
    ("mxfp4-to-fp8", "--on-loss", "ignore"): ("--on-loss", "mxfp8"),
    ("mxfp4-to-fp8", "--device", "cuda:99"): ("--device cuda:99", "use --device cpu"),
    ("mxfp4-to-fp8", "--device", "abacus"): ("--device abacus", "use cpu or cuda"),
    ("mxfp4-to-fp8", "--device", "meta"): ("--device meta: conversions run on cpu or cuda only", "use cpu or cuda"),
}


@pytest.mark.parametrize("words", list(OPTIONS), ids=lambda words: " ".join(words))
def test_wrong_options_are_named_with_what_to_use(words: tuple[str, ...], miles, tmp_path: Path) -> None:
    source = good_source(words[0], tmp_path / "source")
    code, error = miles(words[0], source, tmp_path / "out", *words[1:])
    assert code == 2
    for text in OPTIONS[words]:
        assert text in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("bf16-to-nvfp4", "for a quantised checkpoint use `miles convert requantise`"),
        ("requantise", "requantise reads NVFP4 and FP8 128x128 with their scales"),
        ("bf16-to-fp8", "bf16-to-fp8 reads BF16, F16, F32"),
        ("fp8-to-mxfp8", "no FP8 weight"),
        ("mxfp4-to-fp8", "needs exactly one scale"),
    ],
)
def test_packed_weights_without_their_scales_say_what_is_read(command: str, text: str, miles, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {n: torch.zeros(32, 32, dtype=torch.uint8) for n in (GATE, UP, DOWN)})
    code, error = miles(command, source, tmp_path / "out")
    assert code == 2
    assert text in error


@pytest.mark.parametrize("command", ["bf16-to-nvfp4", "bf16-to-fp8", "requantise"])
def test_a_nan_weight_is_named_with_shard_and_index(command: str, miles, tmp_path: Path) -> None:
    source = good_source(command, tmp_path / "source")
    change(source, lambda tensors: tensors[DOWN].__setitem__((3, 5), float("nan")))
    code, error = miles(command, source, tmp_path / "out")
    assert code == 2
    assert f"model.safetensors: {DOWN}: nan at index [3, 5]" in error
    assert not (tmp_path / "out" / "COMPLETE").exists()
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_weight_that_would_round_to_infinity_is_named(miles, tmp_path: Path) -> None:
    source = good_source("bf16-to-fp8", tmp_path / "source")
    change(source, lambda tensors: tensors[DOWN].__setitem__((3, 5), 3.39e38))
    code, error = miles("bf16-to-fp8", source, tmp_path / "out", "--scale", "e8m0")
    assert code == 2
    assert f"model.safetensors: {DOWN}: the weight at index [3, 5] rounds to inf" in error
    assert miles("bf16-to-fp8", source, tmp_path / "fp32")[0] == 0


def test_scales_that_do_not_fit_are_refused(miles, tmp_path: Path) -> None:
    packed = {n: torch.zeros(32, 32, dtype=torch.uint8) for n in (GATE, UP, DOWN)}
    packed |= {n + "_scale": torch.zeros(32, 5).to(torch.float8_e4m3fn) for n in (GATE, UP, DOWN)}
    packed |= {n + "_scale_2": torch.ones(1) for n in (GATE, UP, DOWN)}
    code, error = miles("requantise", write(tmp_path / "source", packed), tmp_path / "out")
    assert code == 2
    assert f"{DOWN}_scale is F8_E4M3 [32, 5], but {DOWN} needs F8_E4M3 or U8 [32, 4]" in error


def test_a_stray_scale_that_would_be_written_twice_is_refused(miles, tmp_path: Path) -> None:
    source = good_source("bf16-to-nvfp4", tmp_path / "source")
    change(source, lambda tensors: tensors.update({UP + "_scale": torch.ones(1)}))
    code, error = miles("bf16-to-nvfp4", source, tmp_path / "out")
    assert code == 2
    assert f"{UP}_scale is in the checkpoint and would also be written; remove the stray scale" in error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not JSON"),
        ('{"format": "nvfp4"}', "--accept-legacy needs every field stated, missing: block"),
        (
            '{"format": "int3", "block": [1, 16], "scale_dtype": "e4m3", "decode": "te", "four_over_six": {}, "tensors": [], "gate_up_shared": true}',
            "--accept-legacy is no quantisation contract: format",
        ),
    ],
)
def test_check_names_what_is_wrong_with_legacy_fields(text: str, expected: str, miles, tmp_path: Path) -> None:
    source = good_source("bf16-to-nvfp4", tmp_path / "source")
    code, error = miles("check", source)
    assert (code, "has no quantization_contract.json" in error, "miles convert requantise" in error) == (2, True, True)
    fields = tmp_path / "fields.json"
    fields.write_text(text)
    code, error = miles("check", source, "--accept-legacy", fields)
    assert code == 2
    assert expected in error
    code, error = miles("check", source, "--accept-legacy", tmp_path / "missing.json")
    assert (code, "missing.json: cannot be read" in error) == (2, True)


def test_check_names_a_damaged_contract(miles, tmp_path: Path) -> None:
    source = good_source("bf16-to-nvfp4", tmp_path / "source")
    assert miles("bf16-to-nvfp4", source, tmp_path / "out")[0] == 0
    path = tmp_path / "out" / "quantization_contract.json"
    path.write_text(path.read_text().replace('"e4m3"', '"e9"'))
    code, error = miles("check", tmp_path / "out")
    assert code == 2
    assert f"{path} is no quantisation contract: scale_dtype" in error

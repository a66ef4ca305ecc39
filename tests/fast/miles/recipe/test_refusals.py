"""What a run would refuse late or could not do is refused by `recipe check`, `--dry-run` and `train` alike."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from miles.config import ConfigError
from miles.config.metric_names import METRICS
from miles.config.metric_table import REFUSED
from miles.data.tokenizer import build_char_tokenizer
from miles.models.create import create_checkpoint
from miles.orchestrate.dry_run import describe
from miles.recipe import load
from miles.recipe.rules import check_or_raise

ROOT = Path(__file__).resolve().parents[4]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def refusal(*sets: str) -> str:
    with pytest.raises(ConfigError) as raised:
        describe(load(QUICKSTART, sets), sets, Console(quiet=True))
    assert raised.value.exit_code == 2
    with pytest.raises(ConfigError, match=re.escape(str(raised.value))):
        check_or_raise(load(QUICKSTART, sets))
    return str(raised.value)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ("engine.count=100000", "engine.count: input should be less than or equal to 256, got 100000"),
        ("engine.threads=100000", "engine.threads: input should be less than or equal to 1024"),
        ("engine.host=256.1.1.1", "engine.host: '256.1.1.1' does not appear to be an IPv4 or IPv6 address; use an"),
        ("engine.host='a b'", "engine.host: 'a b' is no host name; use an address of this machine"),
        ("engine.device=foo", "engine.device: 'foo' is no device; use cpu, cuda or cuda:N"),
        ("engine.device='cuda:999'", "engine.device: 'cuda:999' is no device"),
        ("run.timeout_s=1e-9", "run.timeout_s: input should be greater than or equal to 1"),
        ("run.replay_steps=[-1]", "run.replay_steps has -1, but run.steps 200 makes the steps 0 to 199"),
        ("run.replay_steps=[200]", "run.replay_steps has 200"),
        ("rollout.stop_token_ids=[-5]", "rollout.stop_token_ids.0: input should be greater than or equal to 0"),
        ("model.create.num_layers=1000000000", "model.create.num_layers: input should be less than or equal to 1024"),
        ("expect={rollout/reward_mean: {min: 2, max: 1}}", "at least min 2.0 and at most max 1.0; swap them"),
        ("expect={rollout/reward_men: {min: 0}}", "reports; did you mean 'rollout/reward_mean'?"),
        ("expect={loss: {min: 0}}", "loss is no metric that a step reports; did you mean train/loss?"),
        ("expect={eval/reward_mean: {min: 0}}", "eval/reward_mean is no metric of eval.sets"),
        (
            "quant.gates=[{name: train/ppo_kI, max_abs: 1}]",
            "gates.0.name: train/ppo_kI is no metric that a step reports; did",
        ),
        ("quant.gates=[{name: train/nonsense, max_abs: 1}]", "quant.gates.0.name: train/nonsense is no metric that a"),
        ("quant.gates=[{name: ppo_kl, max_abs: 1}]", "did you mean train/ppo_kl?"),
        ("quant.gates=[{name: train/teacher_kl, max: 1}]", "'train/teacher_kl': the metric is signed, so a one-sided"),
        ("quant.gates=[{name: rollout/reward_mean, max: 1}]", "'rollout/reward_mean': the metric is signed"),
    ],
)
def test_value_out_of_bounds_is_refused_by_its_key(sets: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(QUICKSTART, [sets])
    assert said in str(raised.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "node-3.cluster"])
def test_addresses_and_names_are_hosts(host: str) -> None:
    assert load(QUICKSTART, [f"engine.host='{host}'"]).engine.host == host


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3"])
def test_devices_of_the_engine_are_accepted(device: str) -> None:
    assert load(QUICKSTART, [f"engine.device='{device}'"]).engine.device == device


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["engine.device='cuda:3'"], "[DEVICES] engine.device cuda:3 names one device, and the placement gives each"),
        (
            ["placement.mode=colocated", "rollout.max_staleness=1", "algo.correction.bypass=true"],
            "rollout.max_staleness 1 has them generate meanwhile; set rollout.max_staleness=0 or placement.mode=disagg",
        ),
        (["rollout.max_context=2"], "[SEQ-FIT] rollout.max_context 2 leaves no token after a prompt of 4; raise it to"),
        (["rollout.max_new_tokens=511"], "need 515 positions, the model's positions allow 512; lower rollout.max_new"),
        (["engine.context_length=7"], "need 8 positions, engine.context_length allows 7; lower rollout.max_new_tokens"),
        (
            ["engine.context_length=513"],
            "engine.context_length 513 is above the model's 512 positions; lower it to 512",
        ),
        (["data.max_prompt_tokens=1"], "has 4 tokens, allowed are 1 to data.max_prompt_tokens=1; raise it"),
        (["rollout.stop_token_ids=[99999]"], "[STOP-IDS] rollout.stop_token_ids has 99999, but the model's tokens are"),
        (["rollout.reward.kind=regex"], "[REWARD] rollout.reward.options.pattern is missing, and reward kind regex"),
        (
            ["rollout.reward.kind=remote_http"],
            "options.url is missing, and reward kind remote_http needs it; set it to",
        ),
        (["rollout.reward.options={strictness: 1}"], "task does not know strictness; it takes no options, remove them"),
        (["rollout.reward={kind: regex, options: {pattern: '('}}"], "'(' is no regular expression"),
        (["rollout.reward={kind: choice_letter, options: {letters: ''}}"], "letters is empty, so no answer could be"),
    ],
)
def test_what_a_run_could_not_do_is_refused_by_a_dry_run(sets: list[str], said: str) -> None:
    assert said in refusal(*sets)


def test_prompt_and_response_that_fit_exactly_pass() -> None:
    check_or_raise(load(QUICKSTART, ["rollout.max_new_tokens=508"]))
    check_or_raise(load(QUICKSTART, ["rollout.max_new_tokens=600", "rollout.max_context=512"]))
    check_or_raise(load(QUICKSTART, ["rollout.max_context=5"]))


def test_a_file_whose_prompts_lie_on_one_side_of_the_split_is_refused_before_training(tmp_path: Path) -> None:
    rows = tmp_path / "one.jsonl"
    rows.write_text('{"prompt": "1=", "answer": "1"}\n')
    sets = ["data.task=jsonl", f"data.jsonl.path={rows}", "expect={}"]
    assert "no prompt of task jsonl is held out" in refusal(*sets)
    check_or_raise(load(QUICKSTART, [*sets, "eval.sets=[]"]))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build_char_tokenizer("0123456789=", tmp_path / "tokenizer")
    return create_checkpoint(tmp_path / "model", tokenizer_dir=tmp_path / "tokenizer", seed=0)


def test_a_whole_folder_passes_and_its_prompts_are_counted_by_its_tokenizer(model: Path) -> None:
    check_or_raise(load(QUICKSTART, [f"model.path={model}"]))
    assert "a prompt of 4 tokens need 515" in refusal(f"model.path={model}", "rollout.max_new_tokens=511")


def test_damaged_folder_is_refused_by_a_dry_run(model: Path) -> None:
    weights, tokenizer, config = (model / name for name in ("model.safetensors", "tokenizer.json", "config.json"))
    path = f"model.path={model}"
    assert "is a file, not a model folder; give the folder that holds it" in refusal(f"model.path={config}")
    whole = tokenizer.read_bytes()
    for broken in (b"", b"{", whole[:100]):
        tokenizer.write_bytes(broken)
        assert "tokenizer: cannot read" in refusal(path)
    build_char_tokenizer("0123456789=+", model.parent / "larger")
    tokenizer.write_bytes((model.parent / "larger" / "tokenizer.json").read_bytes())
    assert "has 14 tokens, but the model has rows for 13; use the tokenizer that" in refusal(path)
    tokenizer.unlink()
    assert "tokenizer.json is missing; give a complete Hugging Face model folder" in refusal(path)
    tokenizer.write_bytes(whole)
    values = load_file(weights)
    values["model.norm.weight"][3] = np.nan
    save_file(values, weights)
    assert "model.safetensors: tensor model.norm.weight: 1 of 64 values are not finite" in refusal(path)
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "truncated safetensors file" in refusal(path)
    weights.unlink()
    weights.mkdir()
    assert "model.safetensors: is a folder, not a safetensors file" in refusal(path)
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "num_hidden_layers": -2}))
    assert "config.json: num_hidden_layers must be at least 1, got -2" in refusal(path)


def test_settings_and_ends_of_the_tokenizer_are_told_once_and_contradictions_refused(model: Path) -> None:
    tokenizer, generation = model / "tokenizer.json", model / "generation_config.json"
    path = f"model.path={model}"
    told = [finding for finding in check_or_raise(load(QUICKSTART, [path])) if finding.rule == "TOKENIZER"]
    assert told == []
    settings = json.loads(tokenizer.read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer.write_text(json.dumps(settings))
    generation.write_text(json.dumps({"eos_token_id": 0}))
    told = [str(finding) for finding in check_or_raise(load(QUICKSTART, [path])) if finding.rule == "TOKENIZER"]
    assert len(told) == 2
    assert "tokenizer.json: truncation to 2 tokens is not applied" in told[0]
    assert "an answer ends at any of them (0, 1); list all of them" in told[1]
    generation.write_text(json.dumps({"eos_token_id": 5}))
    said = refusal(path)
    assert "[TOKENIZER]" in said
    assert "end token 5 is the ordinary token '3'" in said
    assert (
        "config.json names 1 ('<eos>'), generation_config.json names 5 ('3'), the tokenizer names 1 ('<eos>')" in said
    )


def test_missing_base_names_the_file_that_extends_it_and_evidence_is_not_inherited(tmp_path: Path) -> None:
    top = tmp_path / "top.yaml"
    top.write_text("name: top\nextends: nope.yaml\n")
    with pytest.raises(ConfigError, match=r"top\.yaml:2:1: extends nope\.yaml: .*nope\.yaml: no such file"):
        load(top)
    (tmp_path / "nope.yaml").write_text(QUICKSTART.read_text())
    assert load(tmp_path / "nope.yaml").validation.status == "validated"
    assert load(top).validation.status == "untested"


@pytest.mark.parametrize(
    ("depth", "said"),
    [
        (150, r"seed: input should be a valid integer, got \[+\.\.\.$"),
        (300, "nested too deeply for a configuration; check"),
    ],
)
def test_a_deep_value_is_not_shown_whole(tmp_path: Path, depth: int, said: str) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("name: deep\nseed: " + "[" * depth + "]" * depth + "\n")
    with pytest.raises(ConfigError, match=said) as raised:
        load(path)
    assert len(str(raised.value)) < 400


def test_shipped_recipes_start_without_a_warning() -> None:
    paths = sorted((ROOT / "recipes").glob("*.yaml"))
    assert {path.stem: check_or_raise(load(path)) for path in paths} == {path.stem: [] for path in paths}


def test_metric_names_are_those_that_the_components_write() -> None:
    pattern = re.compile(r'"((?:rollout|train|mismatch|data|time)/[a-z0-9_]+)"')
    folders = ("algos", "data", "orchestrate", "rollout", "train")
    sources = [path.read_text() for name in folders for path in (ROOT / "miles" / name).rglob("*.py")]
    assert {name for text in sources for name in pattern.findall(text)} == METRICS | {"time/evaluate"}
    assert any(f'f"{REFUSED}{{' in text for text in sources)

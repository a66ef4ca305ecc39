"""What `recipe check` accepts starts: every object that a run builds before and beside Ray is built, with nothing started.

Recipes are drawn over the option space, as `--set` would make them; the three commands ask one list of questions.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from miles.cli import app
from miles.config import ConfigError
from miles.config.errors import MilesError
from miles.orchestrate import machine
from miles.orchestrate.startable import check_place, check_start
from miles.recipe import Recipe, load

RECIPES = Path(__file__).resolve().parents[4] / "recipes"
BASES = ("quickstart.yaml", "nvfp4_w4a16_tiny.yaml")

# Values that a person may try; most combinations make sense, some do not.
OPTIONS: dict[str, tuple[str, ...]] = {
    "train.device": ("auto", "cpu", "cuda"),
    "train.precision": ("fp32", "bf16"),
    "train.fused_loss": ("auto", "on", "off"),
    "train.parallel.tp": ("1", "2", "3"),
    "train.parallel.pp": ("1", "2"),
    "train.parallel.cp": ("1", "2"),
    "train.parallel.dp": ("1", "2"),
    "train.parallel.ep": ("1", "2"),
    "train.parallel.sp": ("true", "false"),
    "train.parallel.vpp": ("null", "2"),
    "train.megatron.spec": ("auto", "local"),
    "data.layout": ("thd", "bshd"),
    "data.balance": ("tokens", "flops"),
    "data.global_batch_size": ("null", "8", "64"),
    "data.max_prompt_tokens": ("2", "64"),
    "data.held_out_fraction": ("0", "0.1"),
    "rollout.over_sampling": ("1", "1.5"),
    "rollout.max_staleness": ("0", "1", "2"),
    "rollout.partial": ("true", "false"),
    "rollout.group_size": ("1", "4"),
    "rollout.top_p": ("1", "0.9"),
    "rollout.top_k": ("-1", "4"),
    "rollout.temperature": ("1", "0.5"),
    "rollout.max_new_tokens": ("4", "600"),
    "rollout.stop_token_ids": ("[]", "[3]", "[99]"),
    "rollout.reward.kind": ("task", "exact_match", "regex"),
    "algo.advantage": ("grpo", "rloo", "gae", "reinforce_pp"),
    "algo.loss": ("ppo_clip", "gspo", "cispo", "dual_clip", "sft"),
    "algo.correction.bypass": ("true", "false"),
    "algo.correction.mode": ("none", "truncate", "mask"),
    "algo.entropy_coef": ("0", "0.01"),
    "algo.kl": ("{where: loss, estimator: low_var, coef: 0.1}", "{where: loss, estimator: support_exact, coef: 0.1}"),
    "algo.opd_coef": ("0", "0.5"),
    "engine.device": ("cpu", "cuda", "cuda:1"),
    "engine.dtype": ("float32", "bfloat16"),
    "engine.count": ("1", "2"),
    "engine.context_length": ("null", "64", "4096"),
    "engine.max_total_tokens": ("32", "8192"),
    "engine.max_running": ("1", "64"),
    "engine.max_prefill_tokens": ("16", "512"),
    "engine.prefix_cache": ("true", "false"),
    "engine.nvfp4_experts": ("null", "{}"),
    "placement.mode": ("disaggregated", "colocated"),
    "model.create.tied": ("true", "false"),
    "model.create.heads": ("4", "6"),
    "model.create.dtype": ("float32", "bfloat16"),
    "quant.fake_qat": ("null", "nvfp4"),
    "eval.sets": ("[]", "[{name: held_out, prompts: 4}]"),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def no_gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "visible_gpus", lambda: 0)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


def accepted(base: str, sets: list[str]) -> Recipe | None:
    """The recipe, if `recipe check` takes it."""
    try:
        recipe = load(RECIPES / base, sets)
        check_start(recipe)
        check_place(recipe)
    except ConfigError:
        return None
    return recipe


def build_everything(recipe: Recipe, folder: Path) -> None:
    """The constructions of a run in its order, on this process's CPU; nothing is started, no mesh joined."""
    from miles.data.prompts import PromptSource
    from miles.data.tokenizer import Tokenizer
    from miles.evaluate.evaluator import Evaluator
    from miles.orchestrate.backends import build_backend, open_rollout
    from miles.orchestrate.gradient_watch import GradientWatch
    from miles.orchestrate.model_folder import prepare_model
    from miles.orchestrate.run_folder import RunFolder
    from miles.orchestrate.schedule import schedule_config
    from miles.quant.hook import FakeQATHook
    from miles.recipe.inputs import check_model_files
    from miles.rollout.engines.embedded.__main__ import _build
    from miles.rollout.pool import EnginePool
    from miles.rollout.rewards import RewardPool, build_reward
    from miles.train.flops import flops_shape

    folder.mkdir()
    model_dir = prepare_model(recipe, RunFolder(folder))
    check_model_files(model_dir)
    tokenizer = Tokenizer(model_dir)
    rewards = RewardPool(recipe.rollout.reward, build_reward(recipe.rollout.reward, recipe.data), tokenizer)
    prompts = PromptSource(recipe.data, tokenizer, recipe.seed)
    prompts.next_groups(recipe.rollout.batch_groups)

    async def rollout() -> None:
        engines = EnginePool(["http://127.0.0.1:9"], token="t" * 32)
        open_rollout(recipe, engines, prompts, tokenizer, rewards)
        Evaluator(
            recipe.eval,
            data=recipe.data,
            rollout=recipe.rollout,
            engine=engines,
            tokenizer=tokenizer,
            rewards=rewards,
        ).close()

    asyncio.run(rollout())
    hook = FakeQATHook(recipe.quant, model_dir=model_dir)
    for rank in range(recipe.train.parallel.world_size):
        build_backend(recipe, model_dir, rank=rank, device="cpu", address="127.0.0.1", port=1, install=hook)
    from miles.models.family import read_hf_config

    flops = flops_shape(read_hf_config(model_dir)) if recipe.data.balance == "flops" else None
    schedule_config(recipe, pad_id=tokenizer.pad_id, flops=flops)
    GradientWatch(recipe.algo, 10, print)
    _build(recipe.engine, model_dir, 0)._scheduler.stop()


@st.composite
def overrides(draw) -> list[str]:
    keys = draw(st.lists(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=4, unique=True))
    return [f"{key}={draw(st.sampled_from(OPTIONS[key]))}" for key in keys]


STALE = ["rollout.over_sampling=1.5", "rollout.max_staleness=1", "algo.correction.bypass=true"]


@settings(max_examples=60)
@given(base=st.sampled_from(BASES), sets=overrides())
@example(base="quickstart.yaml", sets=STALE)
@example(base="quickstart.yaml", sets=["train.device=cuda"])
@example(base="quickstart.yaml", sets=["engine.device=cuda", "placement.mode=colocated"])
def test_what_check_accepts_can_be_built_whole(tmp_path_factory, base, sets) -> None:
    recipe = accepted(base, sets)
    if recipe is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            build_everything(recipe, tmp_path_factory.mktemp("run") / "run")


def test_the_drawn_recipes_are_not_all_refused() -> None:
    taken = [key for key in OPTIONS for value in OPTIONS[key] if accepted("quickstart.yaml", [f"{key}={value}"])]
    assert len(set(taken)) > 0.8 * len(OPTIONS)


REFUSED = {
    "over-sampling beside staleness": (STALE, "[ROLLOUT-MODE] rollout.over_sampling is 1.5"),
    "a GPU that is not there": (["train.device=cuda"], "placement: needs 1 GPU for 1 trainer rank"),
    "an engine on a GPU that is not there": (["engine.device=cuda"], "but 1 node has 0 free"),
    "a host of another machine": (["engine.host=192.0.2.77"], "engine.host 192.0.2.77"),
    "a rule": (["rollout.stop_token_ids=[99999]"], "[STOP-IDS]"),
    "a tracker": (["observe.trackers=[wandb]"], "observe.trackers: wandb: wandb not installed; pip install"),
    "a file": (["model.path=/nowhere"], "/nowhere: model folder does not exist"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("command", ["check", "dry run", "train"])
def test_the_three_commands_refuse_alike(
    case: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    sets, said = REFUSED[case]
    words = {
        "check": ["recipe", "check", str(RECIPES / "quickstart.yaml")],
        "dry run": ["train", str(RECIPES / "quickstart.yaml"), "--dry-run"],
        "train": ["train", str(RECIPES / "quickstart.yaml")],
    }[command]
    for text in (*sets, f"run.directory={tmp_path}"):
        words += ["--set", text]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, MilesError), done.output
    assert said in str(done.exception)
    assert done.exception.exit_code == 2


def test_warnings_are_the_same_in_all_three(tmp_path: Path) -> None:
    recipe = load(RECIPES / "quickstart.yaml", ["algo.eps_clip=0.15"])
    warned = [str(finding) for finding in check_start(recipe)]
    assert any("IDLE" in text for text in warned)
    out = io.StringIO()
    from miles.orchestrate.dry_run import describe

    describe(recipe, [], Console(file=out, width=10_000))
    assert all(text in out.getvalue() for text in warned)

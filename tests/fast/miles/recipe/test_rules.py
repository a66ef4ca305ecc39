"""Every rule has a recipe that passes it and one that it stops; a rule that nobody can trigger fails here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles.config import ConfigError
from miles.recipe.inputs import FirstPrompts
from miles.recipe.rules import RULES, Facts, Finding, check, check_or_raise, facts_of
from miles.recipe.schema import Recipe
from miles.recipe.tokenizer_files import Objection

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
OWN = Path(__file__).parent / "own_algorithms.py"
EXACT_KL = {"kl": {"where": "loss", "estimator": "support_exact", "coef": 0.1}}
VALIDATED = {"status": "validated", "hardware": "2 CPU cores", "date": "2026-01-01"}


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate_json(json.dumps({"name": "r", "validation": VALIDATED, **sections}))


def told(*objections: Objection) -> Facts:
    return replace(facts(), tokenizer=objections)


def facts(**changes: Any) -> Facts:
    return Facts({**QWEN3, **changes}, "model/config.json")


# id -> (passing, failing); each is a recipe and the facts about its model.
FIXTURES: dict[str, tuple[tuple[Recipe, Facts], tuple[Recipe, Facts]]] = {
    "USER-CODE": (
        (recipe(algo={"advantage": f"python:{OWN}:per_group"}), facts()),
        (recipe(algo={"advantage": f"python:{OWN}:two_arguments"}), facts()),
    ),
    "FAMILY": ((recipe(), facts()), (recipe(model={"family": "qwen3_moe"}), facts())),
    "PARALLEL": (
        (recipe(train={"parallel": {"tp": 2}}), facts()),
        (recipe(train={"parallel": {"tp": 3}}), facts()),
    ),
    "SEQ-FIT": (
        (recipe(rollout={"max_new_tokens": 63}), facts()),
        (recipe(rollout={"max_new_tokens": 64}), facts()),
    ),
    "DEVICES": (
        (recipe(engine={"device": "cuda"}, placement={"mode": "colocated"}), facts()),
        (recipe(engine={"device": "cuda:3"}), facts()),
    ),
    "TEACHER": (
        (recipe(algo={"opd_coef": 0.5, "teacher": "models/teacher"}), facts()),
        (recipe(algo={"opd_coef": 0.5}), facts()),
    ),
    "SUPPORT": (
        (recipe(algo=EXACT_KL, rollout={"top_p": 0.9}), facts()),
        (recipe(algo=EXACT_KL), facts()),
    ),
    "ROLLOUT-MODE": (
        (recipe(rollout={"max_staleness": 1}, algo={"correction": {"bypass": True}}), facts()),
        (recipe(rollout={"max_staleness": 1}), facts()),
    ),
    "ROLLOUT-CODE": (
        (recipe(), facts()),
        (recipe(rollout={"generate": "python:no_such_package:run"}), facts()),
    ),
    "NVFP4-CONTRACT": (
        (recipe(quant={"fake_qat": "nvfp4", "nvfp4": {}}, engine={"nvfp4_experts": {}}), facts(num_experts=8)),
        (recipe(quant={"fake_qat": "nvfp4", "nvfp4": {}}), facts(num_experts=8)),
    ),
    "ENGINE-MODEL": (
        (recipe(model={"path": "model"}), facts()),
        (recipe(model={"path": "model"}), facts(rope_scaling={"rope_type": "yarn", "factor": 2.0})),
    ),
    "STOP-IDS": (
        (recipe(rollout={"stop_token_ids": [0, 31]}), facts()),
        (recipe(rollout={"stop_token_ids": [32]}), facts()),
    ),
    "TOKENIZER": ((recipe(), told()), (recipe(), told(("warning", "padding is not applied", "remove it")))),
    "PROMPTS": ((recipe(), facts()), (recipe(), replace(facts(), prompts=FirstPrompts(notes=["2 prompts; raise it"])))),
    "REWARD": (
        (recipe(rollout={"reward": {"kind": "regex", "options": {"pattern": "x"}}}), facts()),
        (recipe(rollout={"reward": {"kind": "regex"}}), facts()),
    ),
    "FUSED": (
        (recipe(train={"fused_loss": "on"}), facts()),
        (recipe(train={"fused_loss": "on", "parallel": {"tp": 2}}), facts()),
    ),
    "DTYPE": (
        (recipe(train={"precision": "bf16"}, engine={"dtype": "bfloat16"}), facts()),
        (recipe(engine={"dtype": "bfloat16"}), facts()),
    ),
    "IDLE": (
        (recipe(algo={"eps_clip": 0.1}, data={"global_batch_size": 64}), facts()),
        (recipe(algo={"eps_clip": 0.1}), facts()),
    ),
    "EVALUATION": (
        (recipe(eval={"sets": [{"name": "a", "max_new_tokens": 63}]}, rollout={"max_new_tokens": 8}), facts()),
        (recipe(eval={"sets": [{"name": "a", "max_new_tokens": 64}]}, rollout={"max_new_tokens": 8}), facts()),
    ),
    "MEASURED": (
        (recipe(expect={"train/loss": {"max": 1}}), facts()),
        (recipe(expect={"train/kl": {"max": 1}}), facts()),
    ),
    "VALIDATION": ((recipe(), facts()), (recipe(validation={"status": "bring-up"}), facts())),
}


def findings(rule_id: str, case: tuple[Recipe, Facts]) -> list[Finding]:
    (rule,) = (rule for rule in RULES if rule.id == rule_id)
    return list(rule.check(*case))


def test_every_rule_has_fixtures_and_every_fixture_a_rule() -> None:
    assert sorted(FIXTURES) == sorted(rule.id for rule in RULES)
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule_id", FIXTURES)
def test_rule_is_silent_on_its_passing_fixture(rule_id: str) -> None:
    assert findings(rule_id, FIXTURES[rule_id][0]) == []


@pytest.mark.parametrize("rule_id", FIXTURES)
def test_rule_stops_its_failing_fixture_with_a_fix(rule_id: str) -> None:
    found = findings(rule_id, FIXTURES[rule_id][1])
    assert found
    for finding in found:
        assert finding.rule == rule_id
        assert finding.message
        assert finding.fix
        assert str(finding).startswith(f"[{rule_id}] ")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algo": {"advantage": f"python:{OWN}:no_such"}}, "own_algorithms.py has no function no_such"),
        (
            {"algo": {"loss": f"python:{OWN}:two_arguments"}},
            r"algo.loss: .* does not take \(inputs\): missing .*'more'",
        ),
        ({"algo": {"loss": "python:no_such_module:f"}}, "algo.loss: cannot import no_such_module: ModuleNotFoundError"),
        ({"algo": {"advantage": f"python:{OWN}:per_group"}, "rollout": {"group_size": 1}}, "group_size is 1 but"),
        ({"algo": {"advantage": f"python:{OWN}:per_group", "gamma": 0.9}}, "algo.gamma has no effect"),
        ({"algo": {"advantage": f"python:{OWN}:misdeclared"}}, "reads 'gama', which is no option of algo"),
        ({"algo": {"loss": f"python:{OWN}:per_group"}}, "declares groups, which means nothing for a loss"),
        (
            {
                "algo": {"advantage": f"python:{OWN}:against_reference"} | EXACT_KL,
                "rollout": {"top_p": 0.9},
            },
            "support_exact scores the reference on supports",
        ),
        (
            {"algo": {"advantage": f"python:{OWN}:per_group", "kl": {"where": "reward", "coef": 0.1}}},
            "has one reward per rollout and no per-token reward",
        ),
    ],
)
def test_own_code_that_does_not_fit_is_one_finding_before_any_other_rule(sections: dict, said: str) -> None:
    (found,) = check(recipe(**sections), facts())
    assert (found.rule, found.severity) == ("USER-CODE", "error")
    assert re.search(said, str(found))


def test_own_code_gets_what_it_declares() -> None:
    needs = recipe(algo={"advantage": f"python:{OWN}:with_critic", "gamma": 0.9}).algo
    needs.check_declared()
    assert needs.needs_values
    assert not needs.needs_reference
    reference = recipe(algo={"advantage": f"python:{OWN}:against_reference"}).algo
    assert reference.needs_reference
    assert reference.needs_old_log_probs
    assert not reference.needs_values
    plain = recipe(algo={"advantage": f"python:{OWN}:plain"}, rollout={"group_size": 1, "max_new_tokens": 9})
    assert check(plain, facts()) == []


def test_a_teacher_is_refused_by_name() -> None:
    (teacher,) = findings("TEACHER", (recipe(algo={"opd_coef": 0.5}), facts()))
    assert "algo.opd_coef" in teacher.message


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p"),
        ({"rollout": {"ignore_eos": True, "stop_token_ids": [3]}}, "rollout.ignore_eos"),
        ({"sync": {"transport": "broadcast"}}, "sync.transport broadcast"),
        ({"sync": {"pause": "in_place"}}, "sync.pause in_place"),
        ({"placement": {"mode": "colocated"}}, "placement.mode colocated"),
    ],
)
def test_what_an_sglang_server_would_ignore_is_refused_by_name(options, named) -> None:
    assert findings("ROLLOUT-MODE", (recipe(engine={"engine": "sglang"}), facts())) == []
    (found,) = findings("ROLLOUT-MODE", (recipe(engine={"engine": "sglang"}, **options), facts()))
    assert found.message.startswith(named)
    assert found.severity == "error"
    assert findings("ROLLOUT-MODE", (recipe(**options), facts())) == []


def test_exact_kl_without_scores_on_the_support_is_refused() -> None:
    case = recipe(algo={**EXACT_KL, "support_log_probs": "off"}, rollout={"top_p": 0.9})
    (found,) = findings("SUPPORT", (case, facts()))
    assert "algo.support_log_probs is off" in found.message


def test_waves_beside_staleness_are_refused() -> None:
    correction = {"correction": {"bypass": True}}
    (found,) = findings(
        "ROLLOUT-MODE", (recipe(algo=correction, rollout={"max_staleness": 1, "over_sampling": 1.5}), facts())
    )
    assert "rollout.over_sampling is 1.5" in found.message


def test_opsm_needs_a_policy_that_moved() -> None:
    algo = {"opsm": {"delta": 0.1}}
    (found,) = findings("ROLLOUT-MODE", (recipe(algo=algo), facts()))
    assert "data.global_batch_size" in found.fix
    assert findings("ROLLOUT-MODE", (recipe(algo=algo, data={"global_batch_size": 64}), facts())) == []
    assert findings("ROLLOUT-MODE", (recipe(algo={**algo, "correction": {"bypass": True}}), facts())) == []


def test_a_global_batch_larger_than_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"global_batch_size is 257, but a step has .* = 256 rollouts"):
        recipe(data={"global_batch_size": 257})
    with pytest.raises(ValueError, match=r"data\.partial_step has no effect"):
        recipe(data={"partial_step": "train"})
    assert not recipe(data={"global_batch_size": 256}).several_steps


def test_quantised_training_needs_experts_and_written_options() -> None:
    both = {"quant": {"fake_qat": "nvfp4", "nvfp4": {}}, "engine": {"nvfp4_experts": {}}}
    (dense,) = findings("NVFP4-CONTRACT", (recipe(**both), facts()))
    assert "has no routed experts" in dense.message
    (unwritten,) = findings("NVFP4-CONTRACT", (recipe(quant={"fake_qat": "nvfp4"}), facts(num_experts=8)))
    assert unwritten.fix == "write the options out under quant.nvfp4"


def test_trainer_and_engine_must_leave_the_same_experts_alone() -> None:
    case = recipe(quant={"fake_qat": "nvfp4", "nvfp4": {"ignore": ["model.layers.0."]}}, engine={"nvfp4_experts": {}})
    (found,) = findings("NVFP4-CONTRACT", (case, facts(num_experts=8)))
    assert found.fix == "give both the same options: they must round alike"


def test_a_variable_that_rounds_in_the_trainer_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPEN_TRAINING_NVFP4_FAKE_QAT_FLAG", "1")
    (found,) = findings("NVFP4-CONTRACT", (recipe(), facts(num_experts=8)))
    assert "OPEN_TRAINING_NVFP4_FAKE_QAT_FLAG=1" in found.message
    assert found.fix == "unset the variable, or set quant.fake_qat=nvfp4"


def test_parallel_error_lists_every_size_that_does_not_divide() -> None:
    (finding,) = findings("PARALLEL", (recipe(train={"parallel": {"tp": 3, "pp": 5}}), facts()))
    for said in ("tp=3 does not divide the model's 4 attention heads", "2 key/value groups", "pp=5 does not divide"):
        assert said in finding.message


def test_errors_come_before_warnings_and_all_are_shown_at_once(tmp_path: Path) -> None:
    broken = recipe(rollout={"max_new_tokens": 600}, train={"parallel": {"tp": 3}}, validation={"status": "untested"})
    found = check(broken, facts_of(broken))
    assert [finding.rule for finding in found] == ["PARALLEL", "SEQ-FIT", "VALIDATION"]
    assert [finding.severity for finding in found] == ["error", "error", "warning"]
    with pytest.raises(ConfigError) as raised:
        check_or_raise(broken)
    assert str(raised.value).count("\n[") == 1
    assert "VALIDATION" not in str(raised.value)


def test_facts_come_from_the_folder_when_there_is_one_and_from_the_shape_otherwise(tmp_path: Path) -> None:
    made = facts_of(recipe())
    assert made.where == "model.create"
    assert made.hf_config["vocab_size"] == 13  # ten digits, "=", padding and end
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    read = facts_of(recipe(model={"path": str(tmp_path)}))
    assert read == replace(facts(), where=str(tmp_path / "config.json"))
    with pytest.raises(ConfigError, match="model folder does not exist"):
        facts_of(recipe(model={"path": str(tmp_path / "absent")}))


@pytest.mark.parametrize(
    ("reward", "answer", "said"),
    [
        ("regex", 3, "is 3, not text; quote it"),
        (
            "exact",
            3,
            "compares with the answer's text, but the answer of '1+2=' is 3, not text; quote it, or use a rew",
        ),
        ("task", {"a": 1}, 'is {"a": 1}, not text; quote it'),
        ("math_boxed", None, "is missing; quote it"),
        ("exact", "3", None),
        ("remote_http", {"a": 1}, None),
    ],
)
def test_a_reward_that_compares_text_wants_answers_that_are_text(tmp_path, reward, answer, said) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+2=", "answer": answer}) + "\n")
    options = {"remote_http": {"url": "http://127.0.0.1:9/"}, "regex": {"pattern": "(.)"}}.get(reward, {})
    data = {"task": "jsonl", "jsonl": {"path": str(tmp_path / "rows.jsonl")}, "held_out_fraction": 0}
    made = recipe(data=data, eval={"sets": []}, rollout={"reward": {"kind": reward, "options": options}})
    found = [str(finding) for finding in check(made, facts_of(made)) if finding.rule == "REWARD"]
    assert (found == []) is (said is None)
    assert all(said in text for text in found)


def test_answers_of_evaluation_sets_are_looked_at_too(tmp_path) -> None:
    (tmp_path / "e.jsonl").write_text(json.dumps({"prompt": "1=", "answer": 3}) + "\n")
    sets = [{"name": "other", "path": str(tmp_path / "e.jsonl")}]
    for options, count in (({"pattern": "(.)"}, 1), ({"pattern": "(.)", "compare": False}, 0)):
        made = recipe(eval={"sets": sets}, rollout={"reward": {"kind": "regex", "options": options}})
        found = [str(finding) for finding in check(made, facts_of(made)) if finding.rule == "REWARD"]
        assert len(found) == count
        assert all("the answer of '1=' is 3, not text" in text for text in found)

"""Options that act nowhere in a run are told in one line each, before it starts; none stops it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles.recipe.idle_rules import objections
from miles.recipe.rules import check_or_raise
from miles.recipe.schema import Recipe


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate_json(json.dumps({"name": "r", **sections}))


def said(**sections: Any) -> list[str]:
    return [message for message, _ in objections(recipe(**sections))]


RATIO_1 = "one optimizer step on policy has ratio 1"
TWO_STEPS = {"global_batch_size": 128}
BYPASS = {"correction": {"bypass": True}}


@pytest.mark.parametrize(
    ("algo", "expected"),
    [
        ({"eps_clip": 0.01}, ["algo.eps_clip 0.01 acts nowhere"]),
        ({"eps_clip_high": 0.28}, ["algo.eps_clip_high 0.28 acts nowhere"]),
        ({"loss": "gspo"}, ["algo.loss gspo does what ppo_clip does"]),
        ({"loss": "cispo"}, ["algo.loss cispo does what ppo_clip does"]),
        (
            {"loss": "dual_clip", "dual_clip_c": 3.0, "eps_clip": 0.01},
            ["algo.eps_clip 0.01 acts nowhere", "algo.loss dual_clip does what ppo_clip does"],
        ),
    ],
    ids=str,
)
def test_what_only_a_ratio_other_than_one_shows_needs_several_steps_or_bypass(algo, expected):
    assert said(algo=algo) == [f"{message}: {RATIO_1}" for message in expected]
    assert said(algo=algo, data=TWO_STEPS) == []
    assert said(algo={**algo, **BYPASS}) == []


def test_staleness_alone_does_not_move_the_ratio():
    algo = {"loss": "gspo", "correction": {"mode": "truncate"}}
    (message,) = said(algo=algo, rollout={"max_staleness": 1})
    assert message.endswith("ratio 1 without algo.correction.bypass, since old is the policy it starts from")
    assert said(algo={"loss": "gspo", **BYPASS}, rollout={"max_staleness": 1}) == []


@pytest.mark.parametrize(
    ("idle", "message", "acting"),
    [
        (
            {"algo": {"advantage": "gae", "value": {"eps_clip": 0.1}}},
            "algo.value.eps_clip 0.1 acts nowhere: in one optimizer step",
            {"data": TWO_STEPS},
        ),
        (
            {"algo": {"support_log_probs": "off"}},
            "algo.support_log_probs off acts nowhere: the sampler draws from the whole vocabulary",
            {"rollout": {"top_p": 0.9}},
        ),
        (
            {"data": {"balance": "flops"}},
            "data.balance flops acts nowhere: train.parallel.dp 1",
            {"train": {"parallel": {"dp": 2}}},
        ),
    ],
)
def test_options_of_other_sections(idle, message, acting):
    (found,) = said(**idle)
    assert found.startswith(message)
    assert said(**idle, **acting) == []


def test_defaults_are_no_promise():
    assert said() == said(algo={"advantage": "gae"}) == []


def test_they_are_warnings_with_the_remedy_and_the_run_starts():
    (finding, _) = check_or_raise(recipe(algo={"loss": "cispo"}))
    assert (finding.rule, finding.severity) == ("IDLE", "warning")
    assert "data.global_batch_size below the 256 rollouts of a step, or algo.correction.bypass=true" in finding.fix

from __future__ import annotations

import pytest
from pydantic import ValidationError

from miles.algos.config import AlgoConfig, CorrectionConfig, KLConfig, OPSMConfig, RejectConfig, ValueConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "dual_clip"}, "dual_clip_c is None; loss dual_clip needs a value above 1"),
        ({"loss": "dual_clip", "dual_clip_c": 1.0}, "dual_clip_c is 1.0"),
        ({"dual_clip_c": 3.0}, "algo.dual_clip_c has no effect here, it acts with loss=dual_clip"),
        ({"reduction": "fixed"}, "set algo.fixed_length"),
        ({"fixed_length": 8}, "no effect with reduction rollout_mean"),
        ({"eps_clip": 1.0}, "1 - eps_clip must stay above 0"),
        ({"kl": KLConfig(where="reward", coef=0.1)}, "grpo has one reward per rollout"),
        ({"loss": "sft", "opsm": OPSMConfig(delta=0.1)}, "sft uses no advantages"),
        ({"loss": "sft", "correction": CorrectionConfig(bypass=True)}, "sft uses no advantages"),
        ({"loss": "sft", "opd_coef": 0.1}, "algo.opd_coef has no effect here"),
        ({"teacher": "models/large"}, "algo.teacher .* acts with opd_coef above 0"),
        ({"loss": "sft", "eps_clip_high": 0.3}, "algo.eps_clip_high has no effect here"),
        ({"advantage": "rloo", "normalize_std": False}, "algo.normalize_std .* acts with advantage=grpo"),
        ({"gamma": 0.9}, "algo.gamma .* acts with advantage=gae or reinforce_pp"),
        ({"advantage": "reinforce_pp", "gae_lambda": 0.9}, "algo.gae_lambda .* acts with advantage=gae"),
        ({"value": ValueConfig(lr=0.1)}, "algo.value has no effect"),
        ({"advantage": "gae", "zero_variance": "drop"}, "algo.zero_variance .* an advantage within groups"),
        ({"los": "ppo_clip"}, "los"),
        ({"loss": "ppo_clipp"}, "unknown loss 'ppo_clipp'; did you mean 'ppo_clip'.*your own code: path/to/file.py"),
        ({"advantage": "gropo"}, "unknown advantage 'gropo'; did you mean 'grpo'"),
        ({"advantage": "python:"}, "'python:' names no function; write it as path/to/file.py:function"),
        ({"advantage": "python:a b:f"}, "names no function"),
        ({"loss": "python:/x/y.py:2f"}, "names no function"),
        ({"eps_clip": "0.2"}, "eps_clip"),
    ],
)
def test_options_without_a_meaning_are_refused_with_the_remedy(options, message):
    with pytest.raises(ValidationError, match=message):
        AlgoConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "reward", "estimator": "support_exact", "coef": 0.1}, "support_exact is a loss term"),
        ({"where": "reward", "coef": 0.1, "unbiased": True}, "unbiased applies to the loss form"),
        ({"where": "loss", "estimator": "k2"}, "coef is 0"),
        ({"coef": 0.1}, "algo.kl.where is none; use loss or reward"),
        ({"estimator": "k2"}, "algo.kl.where is none; use loss or reward"),
    ],
)
def test_kl_options_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        KLConfig(**options)


@pytest.mark.parametrize(
    "correction",
    [
        {"reject": {"lo": 2.0, "hi": 1.05}},
        {"reject": {"lo": 1.5, "hi": 2.0}},
        {"mode": "mask", "lo": 1.5, "hi": 2.0},
        {"mode": "clip", "lo": 3.0, "hi": 2.0},
    ],
)
def test_bounds_that_reject_what_is_on_policy_are_refused(correction):
    with pytest.raises(
        ValidationError, match=r"algo\.correction\.(reject\.)?lo is .* weight 1 .* lies outside; set it to"
    ):
        CorrectionConfig(**correction)


def test_a_lower_bound_of_one_is_allowed():
    assert CorrectionConfig(mode="mask", lo=1.0, hi=2.0, reject=RejectConfig(lo=1.0)).low == 1.0


def test_defaults_resolve():
    config = AlgoConfig(eps_clip_high=0.28)
    assert (AlgoConfig().clip_high, config.clip_high) == (0.2, 0.28)
    assert RejectConfig(hi=4.0).low == CorrectionConfig(mode="clip", hi=4.0).low == 0.25
    assert AlgoConfig(advantage="gae").needs_values
    assert AlgoConfig(kl=KLConfig(where="loss", estimator="k2", coef=0.1)).needs_reference
    assert AlgoConfig(opd_coef=1.0).needs_teacher


def test_the_critic_is_a_model_of_its_own_and_its_loss_has_no_weight():
    with pytest.raises(ValidationError, match="coef"):
        AlgoConfig(advantage="gae", value={"coef": 0.5})

"""Rotary frequencies against published values, and what a checkpoint must state."""

from __future__ import annotations

import pytest
import torch

from miles.models.errors import ModelError, UnsupportedModelError
from miles.models.rope import RopeSpec

DEEPSEEK_V3 = {
    "rope_theta": 1e4,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
DEEPSEEK_V4 = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1.6e5,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    }
}
# (config, pair -> value); head size 64, values to nine digits from the published configurations.
GOLDENS = {
    "glm-4.7-flash": ({"rope_theta": 1e6}, {0: 1.0, 1: 0.649381638, 16: 1e-3, 31: 1.53992653e-6}),
    "joyai": ({"rope_theta": 32e6}, {0: 1.0, 1: 0.582725525, 16: 1.76776695e-4, 31: 5.36273035e-8}),
    "deepseek-v3": (DEEPSEEK_V3, {0: 1.0, 10: 0.0562341325, 16: 0.0055, 31: 3.33380353e-6}),
    "deepseek-v4-window": ({"rope_theta": 1e4}, {0: 1.0, 1: 0.749894202, 16: 0.01, 31: 1.33352150e-4}),
    "deepseek-v4-compressed": (DEEPSEEK_V4, {15: 3.63553851e-3, 20: 2.96977785e-4, 31: 5.68052883e-7}),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_inv_freq_golden(name):
    config, values = GOLDENS[name]
    frequencies = RopeSpec.from_hf(config, head_dim=64).inv_freq()
    for pair, expected in values.items():
        assert frequencies[pair].item() == pytest.approx(expected, rel=1e-6), pair


def test_yarn_ranges_of_the_published_models():
    assert RopeSpec.from_hf(DEEPSEEK_V3, head_dim=64).yarn_range() == (10, 23)
    assert RopeSpec.from_hf(DEEPSEEK_V4, head_dim=64).yarn_range() == (15, 25)


def test_softmax_scale_of_latent_attention_under_yarn():
    spec = RopeSpec.from_hf(DEEPSEEK_V3, head_dim=64)
    m = 0.1 * torch.log(torch.tensor(40.0)).item() + 1
    assert spec.softmax_scale(192, mla=True) == pytest.approx(192**-0.5 * m * m)
    assert spec.softmax_scale(192) == pytest.approx(192**-0.5)
    assert spec.cos_sin_scale() == 1.0, "mscale equals mscale_all_dim"


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_frequencies_equal_transformers(kind):
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": kind, "rope_theta": 5e5}
    if kind != "default":
        parameters["factor"] = 8.0
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = 2048
    if kind == "llama3":
        parameters |= {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    spec = RopeSpec.from_hf({"rope_parameters": parameters}, head_dim=128)
    config = Qwen3Config(head_dim=128, rope_parameters=dict(parameters), max_position_embeddings=16384)
    if kind == "default":
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        expected, scale = Qwen3RotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    torch.testing.assert_close(spec.inv_freq(), expected, rtol=1e-6, atol=0)
    assert spec.cos_sin_scale() == pytest.approx(scale)


@pytest.mark.parametrize(
    "config", [{"rope_theta": 1e4}, {"rope_theta": 1e4, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 1e4}}]
)
def test_absent_section_is_plain(config):
    assert RopeSpec.from_hf(config, head_dim=64).kind == "plain"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "rope_theta is missing"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters.rope_theta is 1000000.0 but rope_theta is 10000.0",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "'linear' needs 'factor'"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "llama3", "factor": 8}}, "original_max_position_embeddings"),
        ({"rope_theta": 1e4, "rope_scaling": 3}, "rope_scaling must be an object, got int"),
    ],
)
def test_incomplete_or_contradicting_config_is_named(config, message):
    with pytest.raises(ModelError, match=message):
        RopeSpec.from_hf(config, head_dim=64)


def test_unknown_type_lists_the_supported():
    with pytest.raises(
        UnsupportedModelError, match=r"'longrope' is not supported; supported: default, linear, llama3, yarn"
    ):
        RopeSpec.from_hf({"rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}, head_dim=64)


def test_contradicting_recipe_is_refused_with_both_values():
    with pytest.raises(ModelError, match="the recipe says 'yarn' but the checkpoint says 'plain'"):
        RopeSpec.from_hf({"rope_theta": 1e4}, head_dim=64, expected_kind="yarn")


def test_partial_rotary_turns_a_quarter():
    spec = RopeSpec.from_hf({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}, head_dim=256)
    assert spec.dim == 64
    assert spec.inv_freq().shape == (32,)

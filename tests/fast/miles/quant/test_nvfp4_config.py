"""The NVFP4 configuration: what is refused, the environment matrix, the recipe, and the gate that imports nothing."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from pydantic import ValidationError

from miles.quant.config import MetricGate, NVFP4Options, QuantConfig
from miles.quant.errors import QuantConfigError, QuantError
from miles.quant.nvfp4_config import ErrorMode, NVFP4QDQConfig, current_nvfp4_qdq_config, fake_qat_gate

GATE = "OPEN_TRAINING_NVFP4_FAKE_QAT_FLAG"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"e4m3_max": 384}, "e4m3_max must be 256 or 448, got 384"),
        ({"e4m3_max": 256}, "e4m3_max=256 needs use_4over6"),
        ({"error_use_fast_math": True}, "error_use_fast_math needs use_4over6"),
        ({"decode": "fast"}, "decode must be 'te' or 'stored'"),
        ({"error_mode": "MAE"}, "error_mode must be an ErrorMode"),
    ],
)
def test_config_rejects(fields: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NVFP4QDQConfig(**fields)


def test_config_is_frozen_and_hashable() -> None:
    assert {NVFP4QDQConfig(): 1}[NVFP4QDQConfig()] == 1
    with pytest.raises(AttributeError):
        NVFP4QDQConfig().use_4over6 = True


SCOPES = ("none", "weights", "activations", "all")


@pytest.mark.parametrize(("scope", "use_256"), list(itertools.product(SCOPES, SCOPES)))
@pytest.mark.parametrize(("mode", "fast"), list(itertools.product(("MAE", "MSE"), ("0", "1"))))
def test_env_matrix_4x4x4(scope: str, use_256: str, mode: str, fast: str) -> None:
    config = current_nvfp4_qdq_config(
        {
            "NVTE_NVFP4_4OVER6": scope.upper(),
            "NVTE_NVFP4_4OVER6_E4M3_USE_256": use_256.capitalize(),
            "NVTE_NVFP4_4OVER6_ERR_MODE": mode,
            "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": fast,
        }
    )
    if scope in ("none", "activations"):
        assert config == NVFP4QDQConfig()
        return
    assert config == NVFP4QDQConfig(True, 256 if use_256 in ("weights", "all") else 448, ErrorMode(mode), fast == "1")


def test_unset_variables_mean_off_and_4over6_alone_means_256() -> None:
    assert current_nvfp4_qdq_config({}) == NVFP4QDQConfig()
    assert current_nvfp4_qdq_config({"NVTE_NVFP4_4OVER6": "all"}) == NVFP4QDQConfig(True, 256)


@pytest.mark.parametrize("variable", ["NVTE_NVFP4_4OVER6", "NVTE_NVFP4_4OVER6_E4M3_USE_256"])
@pytest.mark.parametrize("value", ["true", "1", "inputs", "gradients", "weight"])
def test_stale_scopes_are_refused_with_variable_value_and_allowed(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{variable}='{value}': allowed are none, weights, activations, all"):
        current_nvfp4_qdq_config({variable: value})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NVTE_USE_FAST_MATH", "1"),
        ("NVTE_NVFP4_4OVER6_ERR_MODE", "mae"),
        ("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "yes"),
    ],
)
def test_other_values_are_refused(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=variable):
        current_nvfp4_qdq_config({variable: value})


def test_fast_math_off_is_accepted_in_both_spellings() -> None:
    assert current_nvfp4_qdq_config({"NVTE_USE_FAST_MATH": "0"}) == current_nvfp4_qdq_config({"NVTE_USE_FAST_MATH": ""})


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", False), ("", False), (None, False), (" 1", False)])
def test_the_gate_is_exactly_one(value: str | None, on: bool) -> None:
    assert fake_qat_gate({} if value is None else {GATE: value}) is on


def test_recipe_and_environment_must_agree_where_both_are_set() -> None:
    config = QuantConfig(fake_qat="nvfp4", nvfp4=NVFP4Options(use_4over6=True, error_mode="MSE"))
    assert config.fake_qat_config({}) == NVFP4QDQConfig(True, 448, ErrorMode.MSE)
    agreeing = {
        "NVTE_NVFP4_4OVER6": "weights",
        "NVTE_NVFP4_4OVER6_E4M3_USE_256": "none",
        "NVTE_NVFP4_4OVER6_ERR_MODE": "MSE",
    }
    assert config.fake_qat_config(agreeing) == NVFP4QDQConfig(True, 448, ErrorMode.MSE)
    with pytest.raises(
        QuantConfigError, match=r"quant\.nvfp4\.e4m3_max is 448 but the NVTE_NVFP4_\* variables ask for 256"
    ):
        config.fake_qat_config({"NVTE_NVFP4_4OVER6": "weights", "NVTE_NVFP4_4OVER6_ERR_MODE": "MSE"})


def test_the_environment_alone_turns_fake_quantisation_on() -> None:
    assert QuantConfig().fake_qat_config({}) is None
    assert QuantConfig().fake_qat_config({GATE: "1"}) == NVFP4QDQConfig()


def test_options_that_would_act_nowhere_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"quant\.nvfp4 acts only with quant\.fake_qat: nvfp4"):
        QuantConfig(nvfp4=NVFP4Options())
    with pytest.raises(ValidationError, match="error_mode=MSE needs use_4over6"):
        NVFP4Options(error_mode="MSE")
    with pytest.raises(ValidationError, match="no regular expression"):
        NVFP4Options(ignore=("re:(",))


def test_recipe_options_obey_the_same_rules() -> None:
    with pytest.raises(ValidationError, match="e4m3_max=256 needs use_4over6"):
        NVFP4Options(e4m3_max=256)


def test_gate_off_imports_nothing() -> None:
    code = (
        "import sys\n"
        "from miles.quant.config import QuantConfig\n"
        "from miles.quant.hook import FakeQATHook\n"
        "hook = FakeQATHook(QuantConfig(), environ={})\n"
        "hook(object()); hook.after_step(3)\n"
        "loaded = [m for m in sys.modules if m in ('torch', 'triton', 'miles.quant.qat') or m.startswith('miles.kernels') and m.endswith(('kernel', 'api'))]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_signed_gate_refused() -> None:
    with pytest.raises(ValidationError, match="'train/ppo_kl': the metric is signed, so a one-sided limit"):
        MetricGate(name="train/ppo_kl", max=1e-3)
    with pytest.raises(ValidationError, match="signed"):
        MetricGate(name="custom/gap", max=1.0, signed=True)
    with pytest.raises(ValidationError, match="exactly one of max_abs and max"):
        MetricGate(name="train/ppo_kl")
    with pytest.raises(ValidationError, match="`signed: false` cannot change that"):
        MetricGate(name="train/ppo_kl", max=1e-3, signed=False)
    assert MetricGate(name="mismatch/k3", max=0.1).is_signed is False


@pytest.mark.parametrize(
    ("metrics", "passes"),
    [
        ({"train/ppo_kl": 9e-4}, True),
        ({"train/ppo_kl": -9e-4}, True),
        ({"train/ppo_kl": -2e-3}, False),
        ({"train/ppo_kl": 2e-3}, False),
        ({"train/ppo_kl": float("nan")}, False),
        ({"train/ppo_kl": float("-inf")}, False),
        ({}, False),
    ],
)
def test_magnitude_gate(metrics: dict[str, float], passes: bool) -> None:
    config = QuantConfig(gates=(MetricGate(name="train/ppo_kl", max_abs=1e-3),))
    if passes:
        config.check_gates(metrics)
    else:
        with pytest.raises(QuantError, match="train/ppo_kl"):
            config.check_gates(metrics)

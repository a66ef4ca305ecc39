"""Estimators and losses of a user's own: what they are given, and what their results are held to."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from miles.algos.advantages import estimator
from miles.algos.config import AlgoConfig, KLConfig
from miles.algos.declared import BUILT_IN, Declared
from miles.algos.losses import loss_function, policy_loss
from miles.algos.objective import NonFiniteError, step_objective
from miles.algos.sequences import Sequences
from miles.algos.step_batches import count_for, estimate_advantages, prepare_steps
from miles.config import ConfigError
from miles.data.schedule import ScheduleConfig
from miles.data.tensors import to_tensors

HEAD = (
    "import numpy as np\nimport torch\n"
    "from miles.algos.advantages import Estimate, declares\nfrom miles.algos.losses import PolicyLoss\n"
)


@pytest.fixture
def own(tmp_path):
    """`own(source)`: a reference to the function `f` of a new file."""
    numbers = iter(range(100))

    def write(source: str) -> str:
        path = tmp_path / f"own_{next(numbers)}.py"
        path.write_text(HEAD + source)
        return f"python:{path}:f"

    return write


def advantages(samples, reference: str, **options) -> np.ndarray:
    config = AlgoConfig(advantage=reference, **options)
    return np.concatenate(estimate_advantages(samples, count_for(samples, config), config).advantages)


@pytest.mark.parametrize("kind", ["advantage", "loss"])
def test_every_built_in_name_has_a_file_with_its_formula_and_every_file_a_name(kind):
    package = importlib.import_module({"advantage": "miles.algos.advantages", "loss": "miles.algos.losses"}[kind])
    entry = {"advantage": "estimate", "loss": "loss"}[kind]
    found = set()
    for path in (importlib.resources.files(package)).iterdir():
        module = importlib.import_module(f"{package.__name__}.{path.stem}") if path.suffix == ".py" else None
        if module is not None and path.stem not in ("__init__", "registry") and hasattr(module, entry):
            assert callable(getattr(module, path.stem))
            found.add(path.stem)
    assert found == set(BUILT_IN[kind])
    for name in found:
        resolve = estimator if kind == "advantage" else loss_function
        assert resolve(name) is getattr(importlib.import_module(f"{package.__name__}.{name}"), entry)


def test_an_own_estimator_that_repeats_a_formula_gives_the_built_in_s_numbers(make_samples, own):
    samples = make_samples(6)
    reference = own(
        "@declares(groups=True)\n"
        "def f(inputs):\n"
        "    out = np.zeros(len(inputs.rewards))\n"
        "    for g in np.unique(inputs.group_index):\n"
        "        m = (inputs.group_index == g) & inputs.in_baseline\n"
        "        out[m] = (inputs.rewards[m] - inputs.rewards[m].mean()) / (inputs.rewards[m].std(ddof=1) + 1e-6)\n"
        "    return inputs.per_token(out)\n"
    )
    active = np.concatenate([s.loss_mask for s in samples]) > 0
    expected = advantages(samples, "grpo")
    found = advantages(samples, reference)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[active], expected[active], rtol=1e-6)
    assert not found[~active].any()


def test_an_own_estimator_sees_exactly_what_it_declares(make_samples, own):
    samples = make_samples(6)
    flat = {name: np.concatenate([getattr(s, name) for s in samples]) for name in ("values", "ref_log_probs")}
    body = "    return Estimate(inputs.per_token(inputs.rewards), inputs.values * 1)\n"
    critic = own(f"@declares(critic=True)\ndef f(inputs):\n    assert inputs.ref_log_probs is None\n{body}")
    config = AlgoConfig(advantage=critic)
    found = estimate_advantages(samples, count_for(samples, config), config)
    active = np.concatenate([s.loss_mask for s in samples]) > 0
    np.testing.assert_array_equal(np.concatenate(found.returns), np.where(active, flat["values"], 0))
    reference = own(
        "@declares(reference=True)\ndef f(inputs):\n    assert inputs.values is None and inputs.kl is None\n"
        "    return inputs.old_log_probs - inputs.ref_log_probs\n"
    )
    old = np.concatenate([s.old_log_probs for s in samples])
    np.testing.assert_array_equal(
        advantages(samples, reference), np.where(active, old - flat["ref_log_probs"], 0).astype(np.float32)
    )
    samples[2].ref_log_probs = None
    with pytest.raises(ValueError, match=r"sample 's2' has no ref_log_probs: .* declares a reference"):
        advantages(samples, reference)


def test_token_rewards_hold_the_kl_and_land_on_the_last_token(make_samples, own):
    samples = make_samples(6)
    reference = own("@declares(token_rewards=True)\ndef f(inputs):\n    return inputs.token_rewards()\n")
    kl = KLConfig(where="reward", coef=0.5)
    found = advantages(samples, reference, kl=kl)
    at = 0
    for sample in samples:
        expected = np.where(sample.loss_mask > 0, -0.5 * (sample.old_log_probs - sample.ref_log_probs), 0.0)
        active = np.flatnonzero(sample.loss_mask)
        if len(active):
            expected[active[-1]] += sample.reward
        np.testing.assert_allclose(found[at : at + len(expected)], expected, rtol=1e-5, atol=1e-6)
        at += len(expected)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return inputs.rewards", "shape .* response tokens; spread values of rollouts with inputs.per_token"),
        ("return np.zeros((len(inputs.mask), 1))", r"shape \[\d+, 1\] for \d+ response tokens; return one number per"),
        ("return inputs.per_token(inputs.rewards).astype(int)", "dtype int64; return float32 or float64"),
        ("return inputs.per_token(inputs.rewards).astype(np.float16)", "dtype float16"),
        ("return [0.0] * len(inputs.mask)", "type list; return a numpy array"),
        ("return None", "type NoneType"),
        ("return torch.zeros(len(inputs.mask))", "type Tensor"),
        ("return inputs.per_token(inputs.rewards) / 0.0", "not finite in float32: .* of sequence 0"),
        ("return np.full(len(inputs.mask), 1e300)", "not finite in float32: 1e\\+300"),
        ("return Estimate(inputs.per_token(inputs.rewards), inputs.per_token(inputs.rewards))", "declare critic=True"),
        ("inputs.rewards[0] = 9.0; return inputs.per_token(inputs.rewards)", "ValueError: assignment destination is"),
        ("inputs.mask[:] = True; return inputs.per_token(inputs.rewards)", "ValueError: assignment destination is"),
        ("return inputs.no_such", "AttributeError"),
    ],
)
def test_a_result_of_another_form_is_refused_with_its_remedy(make_samples, own, body, said):
    samples = make_samples(6)
    samples[0].loss_mask[:] = 1
    with np.errstate(all="ignore"), pytest.raises(ConfigError, match=f"algo.advantage: python:.*{said}"):
        advantages(samples, own(f"def f(inputs):\n    {body}\n"))


def test_a_declared_critic_must_be_given_returns(make_samples, own):
    with pytest.raises(ConfigError, match=r"return Estimate\(advantages, returns\)"):
        advantages(make_samples(6), own("@declares(critic=True)\ndef f(inputs):\n    return inputs.values * 1\n"))


def test_values_at_masked_tokens_are_not_looked_at(make_samples, own):
    samples = make_samples(6)
    found = advantages(samples, own("def f(inputs):\n    return np.where(inputs.mask, 1.0, np.nan)\n"))
    np.testing.assert_array_equal(found, np.concatenate([s.loss_mask for s in samples]).astype(np.float32))


def tokens(n: int = 4):
    log_probs = torch.linspace(-1.0, 0.5, n, requires_grad=True)
    mask = torch.arange(n) != 1
    sequences = Sequences(torch.zeros(n, dtype=torch.int64), torch.tensor([n]))
    return log_probs, torch.zeros(n), torch.tensor([1.0, 5.0, -1.0, 2.0])[:n], mask, sequences


CLIP = (
    "def f(inputs):\n"
    "    ratio = inputs.log_ratio().exp()\n"
    "    clipped = ratio.clamp(inputs.low, inputs.high)\n"
    "    return torch.maximum(-ratio * inputs.advantages, -clipped * inputs.advantages)\n"
)


def test_an_own_loss_that_repeats_a_formula_gives_the_built_in_s_value_and_gradient(make_samples, own):
    samples = make_samples(6)
    gradients, losses = [], []
    for name in ("ppo_clip", own("@declares(reads=('eps_clip', 'eps_clip_high'))\n" + CLIP)):
        config = AlgoConfig(loss=name, eps_clip=0.05, eps_clip_high=0.08)
        batch = to_tensors(prepare_steps(samples, config, ScheduleConfig()).steps[0].ranks[0][0])
        log_probs = (batch.old_log_probs + 0.2 * torch.sin(torch.arange(len(batch.mask)))).requires_grad_(True)
        loss, sums = step_objective(log_probs, batch, config)
        losses.append(float(loss.detach()))
        gradients.append(torch.autograd.grad(loss, log_probs)[0])
        assert sums.finish()["train/ratio_mean"] != 1.0
    assert losses[0] == losses[1]
    assert torch.equal(gradients[0], gradients[1])


def test_an_own_loss_gets_the_reference_it_declares_and_nothing_masked_reaches_the_sum(own):
    log_probs, old, advantages_, mask, sequences = tokens()
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4])
    given = own(
        "@declares(reference=True)\ndef f(inputs):\n    return (inputs.log_probs - inputs.ref_log_probs) ** 2\n"
    )
    config = AlgoConfig(loss=given)
    assert config.needs_reference
    found = policy_loss(log_probs, old, advantages_, mask, sequences, config, ref_log_probs=reference)
    torch.testing.assert_close(found.loss, torch.where(mask, (log_probs - reference) ** 2, 0.0))
    torch.testing.assert_close(found.ratio, torch.where(mask, log_probs.exp(), 1.0).detach())
    assert not found.clipped_low.any()


def test_the_reference_of_a_declaring_loss_comes_from_the_batch_and_is_looked_at(make_samples, own):
    given = own(
        "@declares(reference=True)\ndef f(inputs):\n    return (inputs.log_probs - inputs.ref_log_probs) ** 2\n"
    )
    config = AlgoConfig(loss=given)
    batch = to_tensors(prepare_steps(make_samples(6), config, ScheduleConfig()).steps[0].ranks[0][0])
    log_probs = batch.old_log_probs.clone().requires_grad_(True)
    loss, _ = step_objective(log_probs, batch, config)
    expected = ((batch.old_log_probs - batch.ref_log_probs) ** 2 * batch.weights).sum()
    torch.testing.assert_close(loss, expected)
    with pytest.raises(ValueError, match="declares a reference, but the samples have no ref_log_probs"):
        step_objective(log_probs, replace(batch, ref_log_probs=None), config)
    broken = batch.ref_log_probs.clone()
    broken[batch.mask.nonzero()[0]] = torch.nan
    with pytest.raises(NonFiniteError, match="reference log-prob nan"):
        step_objective(log_probs, replace(batch, ref_log_probs=broken), config)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return (inputs.log_probs * inputs.advantages).mean()", r"shape \[\] for 4 tokens; .* not yet averaged"),
        ("return (inputs.log_probs * inputs.advantages).double()", "torch.float64 on cpu; return torch.float32"),
        ("return (inputs.log_probs * inputs.advantages).detach()", "a loss without gradient"),
        ("return inputs.log_probs / 0.0", "gave -inf at token 0 of the micro-batch"),
        ("return 3.0", "gave a float; return a tensor"),
        ("return inputs.log_probs + inputs.nothing", "raised AttributeError"),
        (
            "x = inputs.log_probs * 1; return PolicyLoss(x, x.detach(), inputs.mask, x.detach())",
            "gave clipped_high of torch.float32",
        ),
    ],
)
def test_an_own_loss_of_another_form_is_refused_with_its_remedy(own, body, said):
    config = AlgoConfig(loss=own(f"def f(inputs):\n    {body}\n"))
    with pytest.raises(ConfigError, match=f"algo.loss: python:.*{said}"):
        policy_loss(*tokens(), config)


def test_an_own_loss_that_is_not_finite_leaves_the_step_to_skip_step(own):
    config = AlgoConfig(loss=own("def f(inputs):\n    return inputs.log_probs / 0.0\n"), nonfinite="skip_step")
    assert not torch.isfinite(policy_loss(*tokens(), config).loss).all()


def test_nothing_declared_needs_nothing(own):
    reference = own(CLIP)
    config = AlgoConfig(loss=reference, advantage=reference)
    assert config.declared_loss == config.declared_advantage == Declared()
    assert not config.needs_values
    assert not config.needs_reference
    assert not config.needs_old_log_probs

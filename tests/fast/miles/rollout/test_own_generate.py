"""`rollout.generate` and filters of the user's own: loaded, bounded, and what they return checked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_engine import FakeEngine, FakePrompts, Letters
from pydantic import ValidationError

from miles.config import ConfigError
from miles.rollout.config import RolloutConfig
from miles.rollout.errors import EngineUnreachable, RolloutError
from miles.rollout.own_generate import generate_function
from miles.rollout.sync_rollout import SyncRollout

HEAD = """
import asyncio
from dataclasses import replace
import numpy as np
from miles.data.sample import Status
from miles.rollout.errors import EngineUnreachable
from miles.rollout.turns import told, written
"""


def config(folder: Path, body: str, **options) -> RolloutConfig:
    path = folder / "own.py"
    path.write_text(f"{HEAD}\nasync def answer(ctx, sample, sampling):\n    {body}\n")
    given = {"batch_groups": 1, "group_size": 2, "max_new_tokens": 8, "generate": f"{path}:answer", **options}
    return RolloutConfig(**given)


def collect(cfg: RolloutConfig):
    async def run():
        rollout = SyncRollout(cfg, FakeEngine(), FakePrompts(), Letters(), run_seed=0)
        await rollout.start(0)
        try:
            return await rollout.collect(0)
        finally:
            await rollout.close()

    return asyncio.run(run())


def test_the_recipes_function_answers_and_its_samples_are_trained(tmp_path):
    body = "return await written(ctx, told(await written(ctx, sample, sampling), np.array([3])), sampling)"
    batch = collect(config(tmp_path, body))
    assert [s.loss_mask.tolist() for s in batch.samples] == [[1, 1, 1, 0, 1, 1, 1]] * 2
    assert batch.weight_version == 0
    assert all(s.reward is not None for s in batch.samples)


def test_a_list_of_segments_is_taken_apart(tmp_path):
    body = "one = await written(ctx, sample, sampling); return [one, replace(one, segment=1)]"
    batch = collect(config(tmp_path, body))
    assert [(s.rollout_id, s.segment) for s in batch.samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 'text'", "returned for sample 0-0 str; return a Sample"),
        ("return [None]", "NoneType; return a Sample"),
        ("return sample", "a pending sample"),
        (
            "return told(await written(ctx, sample, sampling), np.array([3]))",
            "a pending sample: the last turn was told",
        ),
        ("return replace(await written(ctx, sample, sampling), rollout_id=9)", "a sample of another prompt or rollout"),
        ("return replace(await written(ctx, sample, sampling), group_id=9)", "a sample of another prompt or rollout"),
        (
            "one = await written(ctx, sample, sampling); return replace(one, loss_mask=one.loss_mask[1:])",
            "does not fit together: .*loss_mask",
        ),
        ("return replace(await written(ctx, sample, sampling), rollout_log_probs=None)", "without log-probs"),
        ("return replace(await written(ctx, sample, sampling), version_spans=None)", "without log-probs"),
        (
            "one = await written(ctx, sample, sampling); return replace(one, tokens=one.tokens + 1)",
            "does not begin with its prompt",
        ),
        ("return 1 / 0", r"raised ZeroDivisionError: division by zero; mend it\n.*own.py\", line"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_function_and_sample(tmp_path, body, said):
    with pytest.raises(ConfigError, match=rf"(?s)rollout\.generate: .*own\.py:answer .*{said}"):
        collect(config(tmp_path, body))


def test_an_engines_error_stays_what_it_is(tmp_path):
    with pytest.raises(EngineUnreachable, match="gone"):
        collect(config(tmp_path, "raise EngineUnreachable('gone')"))


def test_a_function_that_waits_for_ever_is_ended_with_its_sample_named(tmp_path):
    cfg = config(tmp_path, "await asyncio.sleep(3600)", request_timeout_s=0.2)
    with pytest.raises(RolloutError, match=r"own\.py:answer did not finish sample 0-[01] within 0.2 s"):
        collect(cfg)


def test_a_timeout_of_the_users_own_is_the_users_error(tmp_path):
    with pytest.raises(ConfigError, match="raised TimeoutError: mine"):
        collect(config(tmp_path, "raise TimeoutError('mine')"))


def test_a_plain_function_or_one_of_other_arguments_is_refused(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("def plain(ctx, sample, sampling): ...\nasync def short(ctx): ...\n")
    with pytest.raises(ConfigError, match=r"no coroutine function; write `async def plain\(ctx, sample, sampling\)`"):
        generate_function(RolloutConfig(generate=f"{path}:plain"))
    with pytest.raises(ConfigError, match=r"does not take \(ctx, sample, sampling\)"):
        generate_function(RolloutConfig(generate=f"{path}:short"))


def test_requests_are_sent_early_only_for_a_function_that_says_so(tmp_path):
    cfg = config(tmp_path, "return await written(ctx, sample, sampling)\nanswer.waits_for_version = True")
    assert generate_function(cfg).waits_for_version is True
    other = tmp_path / "other"
    other.mkdir()
    assert not hasattr(generate_function(config(other, "return 1")), "waits_for_version")


def test_partial_answers_do_not_go_with_it():
    with pytest.raises(ValidationError, match=r"rollout\.partial continues an aborted answer"):
        RolloutConfig(generate="a.py:f", partial=True)
    with pytest.raises(ValidationError, match="names no function"):
        RolloutConfig(generate="a.py")


def filtered(folder: Path, body: str) -> RolloutConfig:
    path = folder / "own_filter.py"
    path.write_text(f"seen = []\ndef solved_once(group):\n    {body}\n")
    chain = [{"kind": "python", "path": f"{path}:solved_once"}]
    return RolloutConfig(batch_groups=1, group_size=2, filters={"chain": chain, "starvation_limit": 3})


def test_a_filter_of_the_users_own_refuses_under_its_name(tmp_path):
    batch = collect(filtered(tmp_path, "seen.append(group); return len(seen) > 1"))
    assert {s.group_id for s in batch.samples} == {1}
    assert batch.metrics["rollout/refused/solved_once"] == 1.0


@pytest.mark.parametrize(
    ("body", "said"), [("return 1", "returned 1; return True to keep"), ("return group[9]", "raised IndexError")]
)
def test_a_filter_that_answers_otherwise_is_an_error(tmp_path, body, said):
    with pytest.raises(ConfigError, match=rf"rollout\.filters\.chain: .*solved_once {said}"):
        collect(filtered(tmp_path, body))

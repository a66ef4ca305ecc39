"""Rewards: what each built-in gives, and what happens to functions that fail, hang or return nonsense."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from aiohttp import web
from fake_engine import Letters

from miles.config import ConfigError
from miles.data.prompts import Prompt
from miles.data.sample import Sample, Status
from miles.rollout.config import RewardConfig
from miles.rollout.errors import RewardError
from miles.rollout.math_answers import last_boxed
from miles.rollout.rewards import RewardContext, RewardFn, RewardPool, build_reward


def context(answer="", **kwargs):
    return RewardContext(Prompt(0, np.array([2]), "question", answer, {"difficulty": 1}), **kwargs)


def sample(status=Status.COMPLETED, **kwargs):
    return Sample("s-1", 0, 0, tokens=np.array([2, 3, 4]), prompt_length=1, status=status, **kwargs)


def score(kind, completion, answer, options=None):
    fn = build_reward(RewardConfig(kind=kind, options=options or {}))
    return fn.score(context(answer), sample(), completion)


@pytest.mark.parametrize(
    ("kind", "completion", "answer", "options", "expected"),
    [
        ("exact", " 42 ", "42", {}, 1.0),
        ("exact", " 42 ", "42", {"strip": False}, 0.0),
        ("exact", "43", "42", {}, 0.0),
        ("positional", "352", "352", {}, 1.0),
        ("positional", "351", "352", {}, 2 / 3),
        ("positional", "3521", "352", {}, 0.75),
        ("positional", "", "352", {}, 0.0),
        ("regex", "so x=3, and x=4", "4", {"pattern": r"x=(\d)"}, 1.0),
        ("regex", "so x=3, and x=4", "3", {"pattern": r"x=(\d)"}, 0.0),
        ("regex", "nothing", "3", {"pattern": r"x=(\d)"}, 0.0),
        ("regex", "<answer>", "3", {"pattern": "<answer>", "compare": False}, 1.0),
        ("choice_letter", "I think A. No: the answer is (C)", "C", {}, 1.0),
        ("choice_letter", "Because", "B", {}, 0.0),
        ("choice_letter", "E", "E", {"letters": "ABCDE"}, 1.0),
        ("f1", "The cat sat.", "a cat sat", {}, 1.0),
        ("f1", "cat", "cat dog", {}, 2 / 3),
        ("f1", "", "cat", {}, 0.0),
        ("math_boxed", r"so \boxed{\frac{1}{2}}", "0.5", {}, 1.0),
        ("math_boxed", r"\boxed{3} then \boxed{4}", "4", {}, 1.0),
        ("math_boxed", r"\boxed{1{,}000}", "1000", {}, 1.0),
        ("math_boxed", r"\boxed{1,000}", "1000", {}, 1.0),
        ("math_boxed", r"\boxed{50\%}", "0.5", {}, 1.0),
        ("math_boxed", r"\boxed{-\frac{3}{4}}", "-0.75", {}, 1.0),
        ("math_boxed", "the answer is 4", "4", {}, 0.0),
        ("math_boxed", r"\boxed{4", "4", {}, 0.0),
        ("math_boxed", r"\boxed{2x+2}", "2(x+1)", {}, 1.0),
    ],
)
def test_built_in_scores(kind, completion, answer, options, expected):
    assert score(kind, completion, answer, options) == pytest.approx(expected)


def test_boxed_braces_are_balanced():
    assert last_boxed(r"\boxed{\frac{a}{b}} end") == r"\frac{a}{b}"


def test_an_endless_symbolic_comparison_is_killed_and_counts_as_wrong():
    started = time.monotonic()
    tower = "x^" * 30 + "x"
    assert score("math_boxed", r"\boxed{factorial(factorial(99999999))}", tower, {"timeout_s": 1}) == 0.0
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("exact", {"stripp": True}, "stripp"),
        ("exact", {"strip": "yes"}, "strip"),
        ("regex", {}, "pattern"),
        ("regex", {"pattern": "("}, "regular expression"),
        ("task", {"x": 1}, "no options"),
        ("remote_http", {}, "url is missing, and reward kind remote_http needs it; set it to text"),
        ("remote_http", {"url": "host:80"}, "write it as http://host:port/path"),
        ("exact", {"strip": 1}, "'1' is not true or false"),
        ("choice_letter", {"letters": " "}, "letters is empty"),
        ("python", {}, "path is missing"),
        ("python", {"path": "json"}, "write it as python:package.module:function"),
        ("python", {"path": "no_such_module_here:f"}, "cannot import no_such_module_here: ModuleNotFoundError"),
        ("python", {"path": "json:nothing"}, "json has no function nothing; define it there"),
        ("python", {"path": "json:loads"}, r"does not take \(completion, answer, metadata\)"),
    ],
)
def test_wrong_options_are_config_errors(kind, options, named):
    with pytest.raises(ConfigError, match=named):
        build_reward(RewardConfig(kind=kind, options=options))


def test_a_function_of_the_users_is_called_with_completion_answer_and_metadata(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def judge(completion, answer, metadata):\n"
        "    return {'reward': float(completion == answer), 'difficulty': metadata['difficulty']}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert score("python", "42", "42", {"path": "my_rewards:judge"}) == {"reward": 1.0, "difficulty": 1}
    assert score("python", "43", "42", {"path": "my_rewards:judge"})["reward"] == 0.0
    judged = sample()
    judge(build_reward(RewardConfig(kind="python", options={"path": "my_rewards:judge"})), [judged])
    assert judged.reward_parts == {"difficulty": 1.0}


def judge(fn, samples, **config):
    async def run():
        pool = RewardPool(RewardConfig(**config), fn, Letters())
        try:
            await pool.judge(context("abc", task_score=lambda text, prompt: 0.5), samples)
        finally:
            pool.close()
        return pool.errors

    return asyncio.run(run())


def test_only_samples_with_an_outcome_are_judged():
    group = [sample(status) for status in (Status.COMPLETED, Status.TRUNCATED, Status.ABORTED, Status.FAILED)]
    judge(build_reward(RewardConfig(kind="task")), group)
    assert [s.reward for s in group] == [0.5, 0.5, None, None]


def test_a_dict_gives_the_total_and_its_parts():
    one = sample()
    judge(RewardFn("f", lambda *_: {"reward": 1.5, "format": 0.5}, inline=True), [one])
    assert (one.reward, one.reward_parts) == (1.5, {"format": 0.5})


BAD = {
    "nan": lambda *_: float("nan"),
    "inf part": lambda *_: {"reward": 1.0, "part": float("inf")},
    "no total": lambda *_: {"format": 1.0},
    "raises": lambda *_: 1 / 0,
    "text": lambda *_: "good",
    "nothing": lambda *_: None,
}


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_stops_the_run_naming_the_sample_or_masks_it(name, inline):
    fn = RewardFn("mine", BAD[name], inline=inline)
    with pytest.raises(RewardError, match="s-1"):
        judge(fn, [sample()])
    one = sample()
    assert judge(fn, [one], on_error="mask") == 1
    assert one.reward is None


def test_a_hanging_function_is_given_up_after_the_time_limit():
    with pytest.raises(RewardError, match=r"timeout_s=0\.1"):
        judge(RewardFn("slow", lambda *_: time.sleep(1.0)), [sample()], timeout_s=0.1)


def test_at_most_concurrency_functions_run_at_once():
    running, most = [0], [0]

    async def count(*_):
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1
        return 1.0

    judge(RewardFn("async", count, is_async=True), [sample() for _ in range(12)], concurrency=3)
    assert most[0] == 3


def test_remote_http_posts_the_sample_and_reads_parts():
    seen = []

    async def run():
        async def answer(request):
            seen.append(await request.json())
            return web.json_response({"reward": 0.25, "style": 1.0})

        app = web.Application()
        app.router.add_post("/score", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        one = sample()
        pool = RewardPool(
            RewardConfig(), build_reward(RewardConfig(kind="remote_http", options={"url": url})), Letters()
        )
        await pool.judge(context("abc"), [one])
        await runner.cleanup()
        return one

    one = asyncio.run(run())
    assert (one.reward, one.reward_parts) == (0.25, {"style": 1.0})
    assert seen[0]["answer"] == "abc"
    assert seen[0]["sample_id"] == "s-1"


def test_from_metadata_takes_what_the_rollout_left():
    fn = build_reward(RewardConfig(kind="from_metadata"))
    assert fn.score(context(), sample(metadata={"reward": 0.5}), "") == 0.5
    with pytest.raises(RewardError, match="s-1"):
        fn.score(context(), sample(), "")

"""What each built-in reward gives, and options that are refused."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from judging import Texts, context, samples_of

from miles.config import ConfigError
from miles.data.config import DataConfig, ReasoningGymConfig
from miles.data.prompts import PromptSource
from miles.data.sample import Status
from miles.rollout.errors import RewardError
from miles.rollout.rewards import RewardConfig, RewardFn, RewardPool, build_reward


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
        ("choice_letter", "I think A. No: the answer is (C)", "C", {}, 1.0),
        ("choice_letter", "Because", "B", {}, 0.0),
        ("choice_letter", "E", "E", {"letters": "ABCDE"}, 1.0),
        ("f1", "The cat sat.", "a cat sat", {}, 1.0),
        ("f1", "cat", "cat dog", {}, 2 / 3),
        ("f1", "", "cat", {}, 0.0),
    ],
)
def test_scores_of_text(judge, kind, completion, answer, options, expected):
    assert judge([completion], answer=answer, kind=kind, options=options).rewards == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("options", "answer", "expected"),
    [
        ({"pattern": r"x=(\d)"}, "4", [1.0, 0.0, 0.0, 0.0]),
        ({"pattern": r"x=(\d)"}, "3", [0.0, 0.0, 0.0, 0.0]),
        ({"pattern": "<answer>", "compare": False}, "3", [0.0, 0.0, 1.0, 0.0]),
        ({"pattern": "a.b"}, "a\nb", [0.0, 0.0, 0.0, 1.0]),
    ],
)
def test_scores_of_a_pattern(judge, options, answer, expected):
    texts = ["so x=3, and x=4", "nothing", "<answer>", "a\nb"]
    assert judge(texts, answer=answer, kind="regex", options=options).rewards == expected


def test_scores_of_boxed_answers(judge):
    texts = [
        r"so \boxed{\frac{1}{2}}",
        r"\boxed{3} then \boxed{50\%}",
        r"\boxed{\sin^2 x - \frac12 + \cos^2 x}",
        r"\boxed{\frac{\sqrt{2}}{4}\sqrt{2}}",
        "the answer is 0.5",
        r"\boxed{0.5",
        r"\boxed{0.6}",
    ]
    judged = judge(texts, answer="0.5", kind="math_boxed")
    assert judged.rewards == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert judged.errors == 0


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("exact", {"stripp": True}, "stripp"),
        ("exact", {"strip": "yes"}, "strip"),
        ("regex", {}, "pattern"),
        ("regex", {"pattern": "("}, "regular expression"),
        ("math_boxed", {"timeout_s": True}, "'True' is not a number"),
        ("math_boxed", {"timeout_s": 0}, "0 is no time limit"),
        ("task", {"x": 1}, "no options"),
        ("remote_http", {}, "url is missing, and reward kind remote_http needs it; set it to text"),
        ("remote_http", {"url": "host:80"}, "write it as http://host:port/path"),
        ("exact", {"strip": 1}, "'1' is not true or false"),
        ("choice_letter", {"letters": " "}, "letters is empty"),
        ("python", {}, "path is missing"),
        ("python", {"path": "json"}, "write it as path/to/file.py:function"),
        ("python", {"path": "no_such_module_here:f"}, "cannot import no_such_module_here: ModuleNotFoundError"),
        ("python", {"path": "json:nothing"}, "json has no function nothing; define it there"),
        ("python", {"path": "json:loads"}, r"does not take \(completion, answer, metadata\)"),
    ],
)
def test_wrong_options_are_config_errors(kind, options, named):
    with pytest.raises(ConfigError, match=named):
        build_reward(RewardConfig(kind=kind, options=options))


def test_a_function_runs_in_one_way():
    with pytest.raises(ValueError, match="exactly one"):
        RewardFn("none")
    with pytest.raises(ValueError, match="exactly one"):
        RewardFn("two", inline=lambda *_: 1.0, awaited=lambda *_: 1.0)


def test_only_samples_with_an_outcome_are_judged(judge):
    group = [
        samples_of(["x"], status)[0] for status in (Status.COMPLETED, Status.TRUNCATED, Status.ABORTED, Status.FAILED)
    ]
    judged = judge(["x"], samples=group, task_score=lambda text, prompt: 0.5, kind="task")
    assert judged.rewards == [0.5, 0.5, None, None]


def service(handler):
    """`async with service(handler) as url`."""
    import contextlib

    @contextlib.asynccontextmanager
    async def serving():
        app = web.Application()
        app.router.add_post("/score", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        finally:
            await runner.cleanup()

    return serving()


def ask_service(handler):
    async def run():
        async with service(handler) as url:
            config = RewardConfig(kind="remote_http", options={"url": url})
            pool = RewardPool(config, build_reward(config), Texts(["text"]))
            [one] = samples_of(["text"])
            await pool.judge(context("abc"), [one])
            return one

    return asyncio.run(run())


def test_remote_http_posts_the_sample_and_reads_parts():
    seen = []

    async def answer(request):
        seen.append(await request.json())
        return web.json_response({"reward": 0.25, "style": 1.0})

    one = ask_service(answer)
    assert (one.reward, one.reward_parts) == (0.25, {"style": 1.0})
    assert seen[0]["answer"] == "abc"
    assert seen[0]["sample_id"] == "s-0"
    assert seen[0]["completion"] == "text"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[" * 200_000, "answered no JSON"),
        (b"not json", "answered no JSON"),
        (b"[1]", "expected an object"),
        (b'{"reward": NaN}', "the reward is nan"),
        (b'{"reward": "0.5"}', "the text '0.5'"),
        (b'{"reward": ' + b"9" * 5000 + b"}", "answered no JSON"),
        (b" " * (1 << 20) + b"{}", "more than 1 MiB"),
    ],
)
def test_a_service_that_answers_nonsense_is_an_error_of_that_sample(body, reason):
    async def answer(request):
        return web.Response(body=body)

    with pytest.raises(RewardError, match=reason):
        ask_service(answer)


def test_from_metadata_takes_what_the_rollout_left(judge):
    group = samples_of(["x"])
    group[0].metadata["reward"] = 0.5
    assert judge(["x"], samples=group, kind="from_metadata").rewards == [0.5]
    with pytest.raises(RewardError, match="s-0"):
        judge(["x"], kind="from_metadata")


class Characters:
    def encode(self, text):
        import numpy as np

        return np.arange(len(text), dtype=np.int64)


def gym(dataset, params=None):
    data = DataConfig(
        task="reasoning_gym",
        reasoning_gym=ReasoningGymConfig(dataset=dataset, params=params or {}, template="{question}"),
        max_prompt_tokens=4096,
    )
    [prompt] = PromptSource(data, Characters(), seed=0).next_groups(1)
    return build_reward(RewardConfig(kind="task"), data), prompt


@pytest.mark.parametrize("dataset", ["n_queens", "countdown", "polynomial_multiplication", "simple_integration"])
def test_reasoning_gym_scorers_execute_no_answer(judge, dataset, tmp_path):
    fn, prompt = gym(dataset)
    mark = tmp_path / "executed"
    attack = f"[open({str(mark)!r}, 'w')]"
    judged = judge([attack, prompt.answer], fn, answer=prompt.answer, metadata=prompt.metadata, kind="task")
    assert not mark.exists()
    assert judged.errors == 0
    assert judged.rewards[1] == 1.0
    assert judged.rewards[0] < 0.1


def test_a_reasoning_gym_scorer_gives_part_of_the_reward_for_a_list(judge):
    fn, prompt = gym("string_insertion")
    listed = str(list(prompt.answer))
    assert judge([listed], fn, metadata=prompt.metadata, kind="task").rewards == [pytest.approx(0.1)]

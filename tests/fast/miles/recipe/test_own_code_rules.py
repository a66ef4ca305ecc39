"""Functions that a rollout calls are tried before a run: what is told, and that a trial costs no run its start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from miles.recipe import load
from miles.recipe.rules import check, facts_of

RECIPE = """
name: own
model:
  create: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128}
rollout: {max_new_tokens: 4}
"""


def findings(folder: Path, code: str, options: str) -> list[str]:
    """Lines of rule ROLLOUT-CODE, with what `own.py` holds and the recipe says."""
    (folder / "own.py").write_text(code)
    (folder / "own.yaml").write_text(RECIPE.replace("rollout: {max_new_tokens: 4}", f"rollout: {options}"))
    recipe = load(folder / "own.yaml")
    found = [one for one in check(recipe, facts_of(recipe)) if one.rule == "ROLLOUT-CODE"]
    return [f"{one.severity}: {one.message}; {one.fix}" for one in found]


GENERATE = "{max_new_tokens: 4, generate: own.py:answer}"
FILTER = "{max_new_tokens: 4, filters: {chain: [{kind: python, path: own.py:keep}]}}"
REWARD = "{max_new_tokens: 4, reward: {kind: python, options: {path: own.py:worth}}}"


@pytest.mark.parametrize(
    ("code", "options", "said"),
    [
        (
            "def answer(ctx, sample, sampling): ...",
            GENERATE,
            "own.py:answer is no coroutine function; write `async def",
        ),
        ("async def other(): ...", GENERATE, "has no function answer; define it there"),
        (
            "import nothing_of_this_name",
            GENERATE,
            "ModuleNotFoundError: No module named 'nothing_of_this_name'; mend it",
        ),
        ("def keep(group): return [s.reward for s in group]", FILTER, "returned [0.0, 1.0]; return True"),
        ("def keep(group): return group[2]", FILTER, "raised IndexError"),
        ("def worth(completion, answer, metadata): return '1'", REWARD, "a trial call with the first prompt"),
        ("def worth(completion, answer, metadata): return 1 / 0", REWARD, "ZeroDivisionError: division by zero"),
        ("async def worth(completion, answer, metadata): return 1 / 0", REWARD, "ZeroDivisionError: division by zero"),
        (
            "import os\ndef worth(completion, answer, metadata): os._exit(3)",
            REWARD,
            "a trial call with the first prompt",
        ),
    ],
)
def test_what_would_stop_the_run_at_its_first_group_is_an_error_before_it(tmp_path, code, options, said):
    (line,) = findings(tmp_path, f"{code}\n", options)
    assert line.startswith("error: rollout.")
    assert said in line


def test_functions_that_work_are_silent_and_the_reward_sees_the_prompt_s_own_answer(tmp_path):
    code = f"""
def worth(completion, answer, metadata):
    with open({str(tmp_path / "calls")!r}, "a") as file:
        file.write(f"{{completion}} {{answer}}\\n")
    return float(completion == answer)

def keep(group):
    return group[0].reward < group[1].reward

async def answer(ctx, sample, sampling):
    raise RuntimeError("an engine would be needed")
"""
    options = REWARD.replace("{max_new_tokens: 4,", "{max_new_tokens: 4, generate: own.py:answer,").replace(
        "}}}", "}}, filters: {chain: [{kind: python, path: own.py:keep}]}}"
    )
    assert findings(tmp_path, code, options) == []
    completion, answer = (tmp_path / "calls").read_text().split()
    assert completion == answer


def test_a_reward_whose_failures_are_masked_is_a_warning(tmp_path):
    options = REWARD.replace("kind: python,", "kind: python, on_error: mask,")
    (line,) = findings(tmp_path, "def worth(completion, answer, metadata): return 1 / 0\n", options)
    assert line.startswith("warning: rollout.reward")


def test_a_reward_that_hangs_is_told_after_its_limit(tmp_path):
    options = REWARD.replace("kind: python,", "kind: python, timeout_s: 0.3,")
    code = "import time\ndef worth(completion, answer, metadata): time.sleep(600)\n"
    (line,) = findings(tmp_path, code, options)
    assert line.startswith("error: rollout.reward: a trial call")


def test_inside_an_event_loop_too(tmp_path):
    async def inside() -> list[str]:
        return findings(tmp_path, "async def worth(completion, answer, metadata): return 1\n", REWARD)

    assert asyncio.run(inside()) == []

"""Reward kind `task` of a task of the user's own: its `score`, in worker processes, with answers of any JSON."""

from __future__ import annotations

import json

import pytest

from miles.config import ConfigError
from miles.data.config import DataConfig
from miles.rollout.rewards import RewardConfig, build_reward

SUMS = """
class Sums:
    def __init__(self, options, seed):
        self.bonus = options["bonus"] + seed

    def item(self, index):
        return {"prompt": f"{index}=", "answer": {"sum": index}}

    def score(self, completion, answer, metadata):
        right = completion == str(answer["sum"])
        return {"reward": self.bonus * right, "hard": metadata["hard"]}
"""
SILENT = """
class Silent:
    def __init__(self, options, seed): ...
    def item(self, index):
        return {"prompt": "x"}
"""


def config(path: str, **options) -> DataConfig:
    return DataConfig.model_validate_json(json.dumps({"task": "python", "python": {"path": path, "options": options}}))


def test_the_scorer_runs_in_workers_with_the_options_and_the_seed_of_the_run(judge, tmp_path):
    (tmp_path / "sums.py").write_text(SUMS)
    reward = build_reward(RewardConfig(kind="task"), config(f"{tmp_path}/sums.py:Sums", bonus=2), seed=3)
    judged = judge(["7", "8"], reward, answer={"sum": 7}, metadata={"hard": 0.5})
    assert judged.rewards == [5.0, 0.0]
    assert judged.parts == [{"hard": 0.5}, {"hard": 0.5}]
    assert judged.started >= 1


def test_a_class_without_a_scorer_needs_another_reward(tmp_path):
    (tmp_path / "silent.py").write_text(SILENT)
    data = config(f"{tmp_path}/silent.py:Silent")
    with pytest.raises(
        ConfigError, match=r"has no method score; define score\(self, completion, answer, metadata\), or"
    ):
        build_reward(RewardConfig(kind="task"), data)
    assert build_reward(RewardConfig(kind="exact"), data).name == "exact"

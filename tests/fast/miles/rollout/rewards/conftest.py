"""`judge` makes a pool for one function and judges texts with it; `own_file` writes a function of the user's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from judging import Judged, Texts, context, samples_of

from miles.rollout.rewards import RewardConfig, RewardFn, RewardPool, build_reward


@pytest.fixture
def judge():
    """judge(texts, fn or kind and options, answer=...) -> Judged."""

    def run(texts, fn: RewardFn | None = None, *, answer="", metadata=None, task_score=None, samples=None, **config):
        settings = RewardConfig(**config)

        async def whole() -> Judged:
            pool = RewardPool(settings, fn or build_reward(settings), Texts(texts))
            pool.start()
            group = samples if samples is not None else samples_of(texts)
            try:
                await pool.judge(context(answer, metadata, task_score=task_score), group)
            finally:
                pool.close()
            processes = pool._processes
            return Judged(group, pool.take_errors(), processes.started if processes is not None else 0)

        return asyncio.run(whole())

    return run


@pytest.fixture
def own_file(tmp_path: Path):
    """own_file(source) -> options of reward kind `python` for its function `judge`."""

    def write(source: str, name: str = "own_rewards.py") -> dict[str, str]:
        (tmp_path / name).write_text(source)
        return {"path": f"python:{tmp_path / name}:judge"}

    return write

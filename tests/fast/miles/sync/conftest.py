"""Fixtures of the weight-sync tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from sync_engines import ParameterHost, RunningEngine, qwen3_weights

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig
from miles.rollout.engines.embedded.weight_service import WeightService
from miles.rollout.engines.embedded.weights import WeightReceiver, table_of
from miles.sync.config import SyncConfig
from miles.sync.session import WeightPusher
from miles.weight_wire.table import EngineTable


@pytest.fixture
def start_engine() -> Iterator[Callable[..., RunningEngine]]:
    """start_engine(parameters, table=..., aliases=..., post_process=..., port=0) -> RunningEngine."""
    engines: list[RunningEngine] = []

    def start(
        parameters: dict[str, torch.Tensor],
        *,
        aliases: dict[str, str] | None = None,
        table: EngineTable | None = None,
        post_process: dict[str, Callable[[], None]] | None = None,
        port: int = 0,
    ) -> RunningEngine:
        host = ParameterHost(parameters, aliases)
        own = table or table_of(parameters, aliases=aliases)
        receiver = WeightReceiver(parameters, own, host.state, post_process=post_process)
        engine = RunningEngine(host, WeightService(host, receiver=receiver)).start(port)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()


@pytest.fixture
def tiny_weights() -> dict[str, torch.Tensor]:
    """25 tensors, 104k parameters, the names of a 2-layer Qwen3."""
    return qwen3_weights(seed=1)


@pytest.fixture
def pusher_for(tmp_path: Path) -> Iterator[Callable[..., WeightPusher]]:
    """pusher_for(*engines, config=..., run_id=..., nvfp4=...) -> WeightPusher, closed at the end."""
    pushers: list[WeightPusher] = []

    def make(
        *engines: RunningEngine,
        config: SyncConfig | None = None,
        run_id: str = "run",
        nvfp4: NVFP4QDQConfig | None = None,
    ) -> WeightPusher:
        urls = [engine.url for engine in engines]
        sync = config or SyncConfig(timeout_s=5.0)
        pushers.append(WeightPusher(urls, sync, run_id, directory=tmp_path / "sync", nvfp4=nvfp4))
        return pushers[-1]

    yield make
    for pusher in pushers:
        pusher.close()

"""Which implementation stands behind each seam that a recipe names: training backend, rollout, rollout engine."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from miles.models.family import read_hf_config

if TYPE_CHECKING:
    from miles.data.prompts import PromptSource
    from miles.data.tokenizer import Tokenizer
    from miles.recipe import Recipe
    from miles.rollout.config import EngineConfig
    from miles.rollout.engine import Engine
    from miles.rollout.engines.process import StartingEngine
    from miles.rollout.protocol import Rollout
    from miles.rollout.rewards import RewardPool
    from miles.train.backend import ChunkHook
    from miles.train.megatron.backend import MegatronBackend


def build_backend(
    recipe: Recipe,
    model_dir: Path,
    *,
    rank: int,
    device: str,
    address: str,
    port: int,
    listener: socket.socket | None = None,
    install: ChunkHook | None = None,
) -> MegatronBackend:
    """A backend for `rank` on `device` (cpu, cuda:N); it joins its mesh at `address:port` when `init` is called.

    `listener`: rank 0's socket on that port. `install` is called with each model chunk before it is used (fake quantisation).
    """
    from miles.train.megatron.backend import MegatronBackend

    return MegatronBackend(
        config=recipe.train,
        algo=recipe.algo,
        model_dir=model_dir,
        rank=rank,
        device=device,
        world_size=recipe.train.parallel.world_size,
        master_addr=address,
        master_port=port,
        seed=recipe.seed,
        # Given answers were not drawn at any temperature.
        temperature=1.0 if recipe.supervised else recipe.rollout.temperature,
        rope_kind=recipe.model.rope.type,
        install=install,
        listener=listener,
    )


def open_rollout(
    recipe: Recipe, engine: Engine, prompts: PromptSource, tokenizer: Tokenizer, rewards: RewardPool
) -> Rollout:
    """Samples on policy, or at most `rollout.max_staleness` versions old."""
    from miles.rollout.async_rollout import AsyncRollout
    from miles.rollout.sync_rollout import SyncRollout

    kind = AsyncRollout if recipe.rollout.max_staleness else SyncRollout
    return kind(recipe.rollout, engine, prompts, tokenizer, run_seed=recipe.seed, rewards=rewards)


def start_engine(config: EngineConfig, model_dir: Path, *, log_path: Path | None, token: str) -> StartingEngine:
    """Spawn one engine process; `wait_ready` on the result gives its address."""
    if config.engine == "sglang":
        from miles.rollout.engines.sglang.launch import start as start_sglang

        return start_sglang(config, model_dir, log_path=log_path)
    from miles.rollout.engines.embedded.launch import start

    return start(config, model_dir, log_path=log_path, token=token)


def engine_token(config: EngineConfig, token: str) -> str | None:
    """What the engines' routes want: the run's token, or nothing where they ask for none."""
    return token if config.engine == "embedded" else None


def vocabulary(config: EngineConfig, model_dir: Path) -> int | None:
    """The ids that replies may have, for engines that do not say so themselves."""
    return None if config.engine == "embedded" else int(read_hf_config(model_dir)["vocab_size"])

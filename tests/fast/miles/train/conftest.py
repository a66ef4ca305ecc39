"""Fixtures: tiny model folders, synthetic samples, and ranks forked from this warm process."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

warnings.filterwarnings("ignore")
CHARACTERS = "0123456789=+-"


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character tokenizer as Hugging Face files: 15 tokens, which two tensor-parallel ranks do not divide."""
    from miles.data.tokenizer import build_char_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    build_char_tokenizer(CHARACTERS, folder)
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """A Qwen3 of 4 layers with weights large enough that every part matters."""
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    shape = ModelShape(num_layers=4, hidden_size=32, ffn_hidden_size=64, head_dim=8, init_std=0.2)
    return create_checkpoint(
        tmp_path_factory.mktemp("model") / "qwen3", shape=shape, tokenizer_dir=tokenizer_dir, seed=3
    )


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """A Qwen3-MoE of 2 layers with 4 experts, 2 for each token."""
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    shape = ModelShape(
        hidden_size=32, head_dim=8, init_std=0.2, num_experts=4, experts_per_token=2, expert_ffn_hidden_size=32
    )
    return create_checkpoint(
        tmp_path_factory.mktemp("model") / "moe",
        family="qwen3_moe",
        shape=shape,
        tokenizer_dir=tokenizer_dir,
        seed=3,
    )


# Sockets bound by the parent, by port: rank 0 inherits its own, so no two tests can meet on a port.
LISTENERS: dict[int, socket.socket] = {}


def listen() -> int:
    """Bind a port and keep it; returns its number."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    LISTENERS[port] = listener
    return port


def _child(rank: int, world: int, port: int, body: Callable[..., Any], pipe: Any, limit_s: float) -> None:
    # A rank that hangs says where, before the parent gives up.
    faulthandler.dump_traceback_later(0.8 * limit_s, file=sys.__stderr__)
    # Plain pickle: torch's own reducer would hand tensors over through a process that is about to end.
    try:
        outcome = pickle.dumps(("ok", body(rank, world, port)))
    except BaseException as error:
        kept = error if _picklable(error) else RuntimeError(repr(error))
        outcome = pickle.dumps(("error", kept, traceback.format_exc()))
    pipe.send_bytes(outcome)
    os._exit(0)


def _picklable(error: BaseException) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def fork_ranks(body: Callable[[int, int, int], Any], world: int, *, limit_s: float = 60.0) -> list[Any]:
    """`body(rank, world, port)` in `world` forked processes; results in rank order, the first error re-raised."""
    context = multiprocessing.get_context("fork")
    port = listen()
    ranks = []
    for rank in range(world):
        mine, theirs = context.Pipe()
        process = context.Process(target=_child, args=(rank, world, port, body, theirs, limit_s), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, mine))
    deadline = time.monotonic() + limit_s
    results = []
    try:
        for rank, (_, pipe) in enumerate(ranks):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} of {world} gave no result within {limit_s:g} s")
            kind, value, *trace = pickle.loads(pipe.recv_bytes())
            if kind == "error":
                print(*trace)
                raise value
            results.append(value)
    finally:
        for process, pipe in ranks:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        LISTENERS.pop(port).close()
    return results


@pytest.fixture(scope="session")
def ranks() -> Callable[..., list[Any]]:
    """Run a body in forked ranks; torch and megatron-core are imported once, here."""
    import torch

    torch.set_num_threads(1)
    from miles.train.megatron import platform

    platform.import_core_for_cpu()
    import miles.train.megatron.backend  # noqa: F401

    return fork_ranks


def make_samples(
    count: int = 16,
    *,
    prompt: int = 4,
    response: int = 4,
    vocab: int = 15,
    seed: int = 0,
    ragged: bool = False,
    off_policy: bool = False,
    grouped: bool = False,
) -> list[Any]:
    """Synthetic finished samples, groups of 4; off-policy ones carry old log-probs, so that ratios differ from 1.

    `grouped`: the samples of a group answer one prompt, as after a rollout.
    """
    from miles.data.sample import Sample, Status

    generator = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        before = int(generator.integers(1, prompt + 1)) if ragged else prompt
        after = int(generator.integers(1, response + 1)) if ragged else response
        tokens = generator.integers(0, vocab, before + after)
        if grouped and index % 4:
            question = samples[-1].tokens[: samples[-1].prompt_length]
            tokens, before = np.concatenate([question, tokens[before:]]), len(question)
        samples.append(
            Sample(
                f"s{index}",
                index // 4,
                index,
                tokens,
                before,
                reward=float(generator.random()),
                status=Status.COMPLETED,
                old_log_probs=-generator.uniform(0.5, 4.0, after).astype(np.float32) if off_policy else None,
            )
        )
    return samples


def make_batch(
    samples: list[Any],
    *,
    dp: int = 1,
    layout: str = "bshd",
    tokens: int = 8192,
    multiple: int = 1,
    algo: Any = None,
) -> Any:
    """The TrainBatch of one step over all samples."""
    from miles.algos.config import AlgoConfig
    from miles.algos.step_batches import prepare_steps
    from miles.data.batch_layout import BatchLayout
    from miles.data.schedule import ScheduleConfig

    rows = BatchLayout(layout, pad_multiple=multiple)  # type: ignore[arg-type]
    schedule = ScheduleConfig(data_parallel=dp, max_tokens_per_gpu=tokens, layout=rows)
    return prepare_steps(samples, algo or AlgoConfig(), schedule).steps[0]


def make_backend(
    model: Path,
    rank: int,
    world: int,
    port: int,
    *,
    algo: Any = None,
    lr: float = 1e-2,
    loaded: bool = True,
    recompute: dict[str, Any] | None = None,
    install: Any = None,
    announce: Callable[[Any], None] | None = None,
    share_prompts: bool = True,
    fused_loss: str = "auto",
    **parallel: Any,
) -> Any:
    """A backend that joined its mesh; with weights unless `loaded` is false. `announce` gets it before `init`."""
    from miles.algos.config import AlgoConfig
    from miles.train.config import OptimizerConfig, ParallelConfig, RecomputeConfig, TrainConfig
    from miles.train.megatron.backend import MegatronBackend

    backend = MegatronBackend(
        config=TrainConfig(
            parallel=ParallelConfig(**parallel),
            optimizer=OptimizerConfig(lr=lr),
            recompute=RecomputeConfig(**(recompute or {})),
            timeout_s=60.0,
            share_prompts=share_prompts,
            fused_loss=fused_loss,  # type: ignore[arg-type]
        ),
        algo=algo or AlgoConfig(),
        model_dir=model,
        rank=rank,
        world_size=world,
        device="cpu",
        master_addr="127.0.0.1",
        master_port=port,
        seed=0,
        install=install,
        listener=LISTENERS.get(port),
    )
    if announce is not None:
        announce(backend)
    backend.init()
    if loaded:
        backend.load()
    return backend


@pytest.fixture(scope="session")
def toolbox() -> Any:
    """The builders above, for test modules."""
    from types import SimpleNamespace

    return SimpleNamespace(samples=make_samples, batch=make_batch, backend=make_backend)

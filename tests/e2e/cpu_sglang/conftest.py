"""A real SGLang server on the CPU. Its environment is built where it is missing; where that fails the tests fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from miles.rollout.engines.process import EngineHandle

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/fast/miles/rollout/helpers"))

BUILD_LIMIT_S = 900


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter of `make sglang-cpu`."""
    done = subprocess.run(
        ["make", "sglang-cpu"], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return str(ROOT / ".venv-sglang/bin/python")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3, 2 layers, vocabulary 16 (pad 0, eos 1)."""
    from miles.data.tokenizer import build_char_tokenizer
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    folder = tmp_path_factory.mktemp("model")
    build_char_tokenizer("0123456789=+-*", folder / "tokenizer")
    shape = ModelShape(init_std=0.15)
    return create_checkpoint(folder / "model", family="qwen3", shape=shape, tokenizer_dir=folder / "tokenizer", seed=0)


@pytest.fixture(scope="module")
def server(sglang_python: str, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    """A running server, killed at the end of the module."""
    from miles.rollout.config import EngineConfig
    from miles.rollout.engines.sglang import launch

    config = EngineConfig(
        engine="sglang", python=sglang_python, max_running=64, max_total_tokens=16384, start_timeout_s=300
    )
    with launch(config, small_model, log_path=tmp_path_factory.mktemp("log") / "server.log") as handle:
        yield handle

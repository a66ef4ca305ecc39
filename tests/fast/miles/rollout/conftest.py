"""A tiny Qwen3 checkpoint, one engine process a module, and an in-process engine for tests that need no HTTP."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "helpers"))


def make_model(folder: Path, family: str) -> Path:
    """Vocabulary 16 (pad 0, eos 1), 2 layers, peaked distributions, so that differences would show."""
    from miles.data.tokenizer import build_char_tokenizer
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    build_char_tokenizer("0123456789=+-*", folder / "tokenizer")
    shape = ModelShape(init_std=0.15)
    return create_checkpoint(folder / "model", family=family, shape=shape, tokenizer_dir=folder / "tokenizer", seed=0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 experts, 2 of them for a token."""
    return make_model(tmp_path_factory.mktemp("moe"), "qwen3_moe")


@pytest.fixture(scope="module")
def engine_process(tiny_model: Path):
    """A running embedded engine, killed at the end of the module."""
    from miles.rollout.config import EngineConfig
    from miles.rollout.engines.embedded import launch

    with launch(EngineConfig(max_running=64, max_total_tokens=16384, max_prefill_tokens=256), tiny_model) as handle:
        yield handle


@pytest.fixture
def local_engine(tiny_model: Path):
    """Factory of in-process engines; see `helpers/inprocess.py`."""
    from inprocess import LocalEngine

    engines = []

    def make(**options) -> LocalEngine:
        engines.append(LocalEngine(tiny_model, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()

"""Fixtures: a tokenizer and a tiny created model."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from miles.data.tokenizer import build_char_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    build_char_tokenizer("0123456789=+-", folder)
    return folder


@pytest.fixture
def model_dir(tmp_path: Path, tokenizer_dir: Path) -> Path:
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    shape = ModelShape(hidden_size=16, ffn_hidden_size=32, head_dim=4)
    return create_checkpoint(tmp_path / "model", shape=shape, tokenizer_dir=tokenizer_dir, seed=0)

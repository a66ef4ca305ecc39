"""Triton kernels run through the interpreter here: it must be chosen before anything imports triton."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def write_bundle() -> Callable[..., Path]:
    """A whole step bundle from one process: (root, step, manifest, rank -> record) -> `root/step_<n>`."""

    def write(root: Path, step: int, manifest: Mapping[str, Any], ranks: Mapping[int, Any]) -> Path:
        from miles.data.step_bundle import finish_bundle, open_bundle, write_rank

        folder = open_bundle(root, step)
        for rank, record in ranks.items():
            write_rank(folder, rank, record)
        return finish_bundle(folder, {"step": step, **manifest})

    return write

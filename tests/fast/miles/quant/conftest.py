"""Golden files and the numpy implementation they come from."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def numpy_nvfp4() -> ModuleType:
    spec = importlib.util.spec_from_file_location("numpy_nvfp4", HERE / "numpy_nvfp4.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["numpy_nvfp4"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def golden():
    def load(name: str) -> dict[str, torch.Tensor]:
        return load_file(HERE / "golden" / f"{name}.safetensors")

    return load

"""Random state of a worker: Python, NumPy, torch. Captured into and restored from checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, JSON) that `restore` takes back."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {"rng/torch": torch.get_rng_state(), "rng/numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, int(position), int(has_gauss), float(cached)],
    }
    return tensors, state


def restore(tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    """Set all generators to a captured state."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, position, has_gauss, cached = state["numpy"]
    keys = tensors["rng/numpy"].numpy().astype(np.uint32)
    np.random.set_state((kind, keys, position, has_gauss, cached))
    torch.set_rng_state(tensors["rng/torch"])
    if "rng/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng/cuda"])


def seed_all(seed: int) -> None:
    """Seed every generator; ranks differ by their seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)

"""What a worker process of reward kind `callable` runs: a function that the driver's program made, sent by value."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any


def make(pickled: str) -> Callable[[str, Any, dict[str, Any]], Any]:
    """`pickled`: base64 of what cloudpickle made in the driver, which alone writes to this process."""
    return pickle.loads(base64.b64decode(pickled))

"""Samples for tests of the data model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miles.data.sample import Sample, Status


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    """A valid sample: `prompt` + `response` tokens; any field may be overridden."""
    serial = iter(range(10_000))

    def make(response: int = 4, prompt: int = 3, **fields: Any) -> Sample:
        number = next(serial)
        defaults: dict[str, Any] = {
            "sample_id": f"s{number}",
            "group_id": 0,
            "rollout_id": number,
            "tokens": np.arange(2, 2 + prompt + response, dtype=np.int64),
            "prompt_length": prompt,
            "reward": 1.0,
            "status": Status.COMPLETED,
        }
        return Sample(**{**defaults, **fields})

    return make

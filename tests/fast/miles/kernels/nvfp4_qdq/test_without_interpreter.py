"""On a CPU without the interpreter the kernel is refused with what to use instead."""

from __future__ import annotations

import os

import pytest
import torch

from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process interprets")
def test_cpu_weights_need_the_interpreter_or_the_reference() -> None:
    from miles.kernels.nvfp4_qdq.api import qdq_nvfp4

    with pytest.raises(TypeError, match=r"use reference\.qdq, or set TRITON_INTERPRET=1 before the import"):
        qdq_nvfp4([torch.zeros(16, 16, dtype=torch.bfloat16)], NVFP4QDQConfig())

"""On a CPU without the interpreter the kernel is refused with what to use instead."""

from __future__ import annotations

import os
import subprocess
import sys

CALL = """
import torch
from miles.kernels.nvfp4_qdq.api import qdq_nvfp4
from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig

try:
    qdq_nvfp4([torch.zeros(16, 16, dtype=torch.bfloat16)], NVFP4QDQConfig())
except TypeError as error:
    print(error)
"""


def test_cpu_weights_need_the_interpreter_or_the_reference() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, timeout=60)
    assert "use reference.qdq, or set TRITON_INTERPRET=1 before the import" in done.stdout, done.stderr

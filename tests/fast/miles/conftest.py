"""Triton kernels run through the interpreter here: it must be chosen before anything imports triton."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

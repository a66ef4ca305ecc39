"""Settings of every test process, before any library reads them.

One thread each: tests run in parallel processes, and threads of several torch processes on few cores mostly wait for
each other.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

"""Settings of every test process, before any library reads them.

One thread each: tests run in parallel processes, and threads of several torch processes on few cores mostly wait for
each other. A forked child never collects what its parent left as garbage: the destructor of a process group joins
threads that exist in the parent only, and would wait for ever.
"""

from __future__ import annotations

import gc
import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)

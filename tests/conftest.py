"""Settings of every test process, before any library reads them.

One thread each: tests run in parallel processes, and threads of several torch processes on few cores mostly wait for
each other. A forked child never collects what its parent left as garbage: the destructor of a process group joins
threads that exist in the parent only, and would wait for ever.

Property tests have one profile: the same examples every time, no limit on the time of one example, no judgement of how
long Hypothesis takes to draw (its tables are built at the first use). At night (`TESTS_PROFILE=nightly`, or a scheduled
workflow) examples are random, and five times as many where a test does not say how many.
"""

from __future__ import annotations

import gc
import os

from hypothesis import HealthCheck, settings

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)

_steady = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("steady", _steady)
settings.register_profile("nightly", _steady, derandomize=False, max_examples=500)
_scheduled = os.environ.get("GITHUB_EVENT_NAME") == "schedule"
settings.load_profile(os.environ.get("TESTS_PROFILE") or ("nightly" if _scheduled else "steady"))

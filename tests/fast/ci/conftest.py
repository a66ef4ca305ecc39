"""Property tests that give the same answer every time: fixed examples, no limit on the time of one example."""

from __future__ import annotations

from hypothesis import settings

# A busy machine must not turn a slow example into a failure, nor chance a change into one.
settings.register_profile("steady", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("steady")

"""What the runner needs of the operating system, refused by name where it is missing. The rest of the harness needs
nothing of it."""

from __future__ import annotations

import sys

from miles_ci.errors import UsageError

NEEDS = "Linux (/proc, prctl, flock)"


def why_not(platform: str = sys.platform) -> str | None:
    """Why no test can be run on this system; None where it can."""
    return None if platform == "linux" else f"the runner needs {NEEDS}, and this system is {platform}"


def require(platform: str = sys.platform) -> None:
    """`UsageError` where the runner's supervisor cannot work."""
    reason = why_not(platform)
    if reason is not None:
        raise UsageError(
            f"run: {reason}; run the suite on Linux, or single files by plain `pytest PATH` here "
            "(plan, lint, list, explain, generate and report work on any system)"
        )

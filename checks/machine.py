"""`python checks/machine.py [GOAL…]`: may the environment be made with this Python, on this machine? One line where not.

Run by `make` before anything is installed, so any Python 3 must be able to read it, and it needs the standard library only.
"""

from __future__ import annotations

import platform
import sys

OLDEST, NEWEST = (3, 11), (3, 13)


def refusal(version: tuple[int, int], system: str, machine: str) -> str | None:
    """One line with the way out, or None. `version` is (major, minor); the others as `platform` says them."""
    if version < OLDEST:
        return "Python 3.11, 3.12 or 3.13 is needed"
    if version > NEWEST:
        return (
            "megatron-core, alone of all packages, has no wheel for Python 3.14 or newer; 3.11, 3.12 or 3.13 is needed"
        )
    if system != "Linux":
        return (
            "megatron-core, alone of all packages, has no wheel for this system; a Linux container or virtual machine "
            "runs everything on the CPU (on Apple silicon: linux/arm64)"
        )
    if machine not in ("x86_64", "aarch64"):
        return "megatron-core, torch and Ray have wheels for x86_64 and aarch64 only"
    return None


def main(goals: list[str]) -> int:
    reason = refusal(sys.version_info[:2], platform.system(), platform.machine())
    if reason is None:
        return 0
    found = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.system()} {platform.machine()}"
    again = " ".join(["make PYTHON=/path/to/python3.11", *goals])
    sys.stderr.write(f"{reason}; found: {found}. Use: {again}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The one package of ours that not every machine can have, refused by name where it is missing."""

from __future__ import annotations

import importlib.util
import platform
import sys

from miles.config import ConfigError

NEEDS = "it has wheels for Python 3.11 to 3.13 on Linux (x86_64 and aarch64)"
WAY_OUT = "use such a Python there; on a Mac, a linux/arm64 container or virtual machine"


def require() -> None:
    """`ConfigError` in one line where megatron-core is not installed."""
    if not _present("megatron.core"):
        here = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.system()} {platform.machine()}"
        raise ConfigError(f"training needs megatron-core, which is not installed: {NEEDS}, this is {here}; {WAY_OUT}")


def _present(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False

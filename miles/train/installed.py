"""The one package of ours that not every machine can have, refused by name where it is missing."""

from __future__ import annotations

import importlib.util
import platform
import sys
from importlib.machinery import PathFinder

from miles.config import ConfigError

MODULE = "megatron.core"
NEEDS = "it has wheels for Python 3.11 to 3.13 on Linux (x86_64 and aarch64)"
WAY_OUT = "use such a Python there; on a Mac, a linux/arm64 container or virtual machine"


def require() -> None:
    """`ConfigError` in one line where megatron-core is not installed."""
    if not _present(MODULE):
        here = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.system()} {platform.machine()}"
        raise ConfigError(f"training needs megatron-core, which is not installed: {NEEDS}, this is {here}; {WAY_OUT}")


def _present(module: str) -> bool:
    """Whether `parent.module` can be found; nothing is imported, not even the parent."""
    parent, _, _ = module.rpartition(".")
    try:
        found = importlib.util.find_spec(parent)
    except (ModuleNotFoundError, ValueError):  # a parent's parent is missing, or is no package
        return False
    places = None if found is None else found.submodule_search_locations
    return places is not None and PathFinder.find_spec(module, list(places)) is not None

"""Rooms that can be called: `miles.train` is where training lives, and `miles.train(...)` trains.

An import of `miles.train.backend` anywhere puts the room into the place of a function of the same name
(docs/decisions/0010-rooms-that-can-be-called.md).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

# By name, as this lies below everything: the call is what imports it.
INTERFACE = "miles.api"


class _CallableRoom(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(INTERFACE), self.__name__.rpartition(".")[2])(*arguments, **options)


def make_callable(room: str) -> None:
    """Calling the package `room` from now on calls the function of its name in `miles.api`."""
    sys.modules[room].__class__ = _CallableRoom

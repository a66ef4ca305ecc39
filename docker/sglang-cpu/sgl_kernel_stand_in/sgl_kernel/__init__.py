"""SGLang's compiled kernels, by name only: every name can be imported, and one that is called says that it is missing.

A text model of the Qwen3 or Llama kind on `--attention-backend torch_native` calls none of them. What does fails loudly,
it never computes something else.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

__version__ = "0.4.10"


def _missing(name: str) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{name} is a compiled kernel, and this environment has the stand-in without any")

    call.__name__ = call.__qualname__ = name
    return call


def _attribute(module: str) -> Callable[[str], Any]:
    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{module}.{name}")

    return get


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any `sgl_kernel.x.y` exists and is empty but for names that raise when called."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(__name__ + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _attribute(spec.name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


__getattr__ = _attribute(__name__)
# Last: a real file of this package (scalar_type) comes first.
sys.meta_path.append(_Submodules())

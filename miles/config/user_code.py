"""Functions of the user's own: `path/to/file.py:function` or `package.module:function`, `python:` before it or not.

One loader for every option that takes such a reference. A path, and a module that lies beside the recipe, become an
absolute file where the recipe is read, so that they mean the same in every process. The code is the user's and is trusted as such; what goes wrong in it, on
import or in a call, is one `ConfigError` that names the option and shows the user's own traceback.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from miles.config.errors import ConfigError

PREFIX = "python:"
FORMS = "path/to/file.py:function or package.module:function"
# Lines of a traceback that an error shows: its end, where the fault is.
MAX_LINES = 40
_BARE_FILE = re.compile(r"(?!python:)[^:\s]+\.py:[A-Za-z_][A-Za-z0-9_]*\Z")
_BARE_MODULE = re.compile(r"(?!python:)(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*\Z")
_REFERENCE = re.compile(r"python:(?P<where>[^:\s][^:\n]*):(?P<name>[A-Za-z_][A-Za-z0-9_]*)\Z")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
_OURS = (__file__, importlib.__file__, "<frozen importlib")


def is_reference(text: str) -> bool:
    """Whether an option's value means code of the user's own, well formed or not; names of ours have no colon."""
    return ":" in text


def reference(text: str) -> str:
    """A reference in its one full form, with the prefix; a name of ours stays."""
    return text if text.startswith(PREFIX) or ":" not in text else PREFIX + text


def check_form(text: str) -> None:
    """`ValueError` for a reference that names no function."""
    match = _REFERENCE.match(reference(text))
    if match is None or not (match["where"].endswith(".py") or _MODULE.match(match["where"])):
        raise ValueError(f"{text!r} names no function; write it as {FORMS}")


def full_reference(text: str) -> str:
    """What an option that takes nothing but code of the user's own holds. `ValueError` for what names no function."""
    check_form(text)
    return reference(text)


def file_of(text: str) -> Path | None:
    """The file of `python:path/to/file.py:function`; None for a module, or for what is no reference."""
    match = _REFERENCE.match(text)
    return Path(match["where"]) if match is not None and match["where"].endswith(".py") else None


def with_absolute_files(value: Any, folder: Path) -> Any:
    """Plain data in which the files of references are absolute: a relative one begins at `folder`."""
    if isinstance(value, dict):
        return {key: with_absolute_files(child, folder) for key, child in value.items()}
    if isinstance(value, list):
        return [with_absolute_files(child, folder) for child in value]
    if isinstance(value, str) and _BARE_FILE.match(value):
        value = PREFIX + value
    path = (file_of(value) or _module_beside(value, folder)) if isinstance(value, str) else None
    if path is None:
        return value
    return f"{PREFIX}{(folder / path).resolve()}:{value.rpartition(':')[2]}"


def _module_beside(text: str, folder: Path) -> Path | None:
    """The file of `package.module:function`, when it lies in that folder."""
    match = _BARE_MODULE.match(text.removeprefix(PREFIX))
    if match is None:
        return None
    path = folder.joinpath(*match["module"].split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def source_files(value: Any) -> list[Path]:
    """The files, sorted, that the references in plain data name; a module's where it can be found."""
    if isinstance(value, (dict, list)):
        children = value.values() if isinstance(value, dict) else value
        return sorted({path for child in children for path in source_files(child)})
    if not isinstance(value, str) or (match := _REFERENCE.match(value)) is None:
        return []
    if (path := file_of(value)) is not None:
        return [path]
    try:
        spec = importlib.util.find_spec(match["where"])
    except (ImportError, ValueError):
        spec = None
    return [] if spec is None or not spec.has_location or spec.origin is None else [Path(spec.origin)]


@functools.cache
def load(text: str, *, option: str, parameters: tuple[str, ...], may_await: bool = False) -> Callable[..., Any]:
    """The function that `text` names, which must accept one positional argument for each of `parameters`.

    `ConfigError` with the user's traceback when the import fails; it names `option` and what to change. `may_await`:
    a coroutine function is welcome.
    """
    try:
        check_form(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    where, name = reference(text).removeprefix(PREFIX).rsplit(":", 1)
    module = _imported(where, option)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{option}: {where} has no function {name}; define it there")
    if inspect.iscoroutinefunction(function) and not may_await:
        raise ConfigError(f"{option}: {text} is a coroutine function; write a plain `def {name}`")
    _check_signature(function, text, name, option, parameters)
    return function


@contextlib.contextmanager
def running(text: str, *, option: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Whatever the user's function raises becomes a `ConfigError` with its traceback; `passing` and our own pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (ConfigError, *passing)):
            raise
        raise ConfigError(f"{option}: {text} raised {_summary(error)}; mend it\n{_shown(error)}") from error


def _imported(where: str, option: str) -> ModuleType:
    path = Path(where)
    is_file = where.endswith(".py")
    if is_file and not path.is_file():
        raise ConfigError(f"{option}: there is no file {where}; a relative path begins at the recipe's folder")
    remedy = "mend it" if is_file else "mend it, install the package or add its folder to PYTHONPATH"
    try:
        return _file_module(path) if is_file else importlib.import_module(where)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may do anything on import, `sys.exit` too
        raise ConfigError(f"{option}: cannot import {where}: {_summary(error)}; {remedy}\n{_shown(error)}") from error


def _file_module(path: Path) -> ModuleType:
    """Loaded once a process; a file of a package by its place there, any other under a name of its own.

    So dataclasses and pickles find their module, relative imports work, and a file may import those beside it: its
    folder is looked at last, after everything that is installed.
    """
    path = path.resolve()
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    if str(root) not in sys.path:
        sys.path.append(str(root))
    if root != path.parent:
        parts = path.relative_to(root).with_suffix("").parts
        module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        if Path(module.__file__ or "").resolve() != path:
            raise ImportError(f"{module.__name__} is {module.__file__} already; give the package another name")
        return module
    name = f"miles_user_code_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_signature(
    function: Callable[..., Any], text: str, name: str, option: str, parameters: Sequence[str]
) -> None:
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        listed = ", ".join(parameters)
        raise ConfigError(f"{option}: {text} does not take ({listed}): {error}; define {name}({listed})") from None
    except ValueError:
        pass  # a function without a signature (written in C) is tried when it is called


def _summary(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def _shown(error: BaseException) -> str:
    """The traceback from the user's first frame on, indented."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    lines = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).splitlines()
    return "\n".join(f"    {line}" for line in lines[-MAX_LINES:])

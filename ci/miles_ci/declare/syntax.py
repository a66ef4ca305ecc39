"""Whether every test file compiles: of most of them the scan, which is quick, reads no more than the bytes.

A file that does not compile fails when it runs; this says so before, with the place.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from miles_ci.declare.cache_folder import KEPT_UNUSED, read_cache, write_cache
from miles_ci.declare.tree import MAX_PARSED_BYTES
from miles_ci.errors import Diagnostic

# The grammar belongs to the interpreter, so another one knows nothing.
CACHE_NAME = f"syntax-{sys.hexversion:x}.json"


def syntax_findings(root: Path, paths: Iterable[str], cache_dir: Path | None) -> list[Diagnostic]:
    """One finding for each of the files that does not compile; contents known to be sound are not compiled again."""
    known = dict.fromkeys(_strings(read_cache(cache_dir, CACHE_NAME)))
    sound: dict[str, None] = {}
    found: list[Diagnostic] = []
    for path in paths:
        try:
            with open(os.path.join(root, path), "rb") as stream:
                data = stream.read()
        except OSError:
            # The scan has reported it, or it was removed meanwhile.
            continue
        key = hashlib.blake2b(data, digest_size=32).hexdigest()
        problem = None if key in known else _problem(path, data)
        if problem is None:
            sound[key] = None
        else:
            found.append(problem)
    if not sound.keys() <= known.keys():
        unused = [key for key in known if key not in sound]
        write_cache(cache_dir, CACHE_NAME, [*sound, *unused[:KEPT_UNUSED]])
    return found


def _problem(path: str, data: bytes) -> Diagnostic | None:
    if len(data) > MAX_PARSED_BYTES:
        message = (
            f"larger than {MAX_PARSED_BYTES >> 20} MiB: whether it compiles is not checked; move its data elsewhere"
        )
        return Diagnostic(path, 1, 1, "too-large", message, "warning")
    nul = data.find(b"\0")
    if nul >= 0:
        before = data[:nul]
        line, column = before.count(b"\n") + 1, nul - before.rfind(b"\n")
        return Diagnostic(path, line, column, "syntax-error", "the file does not compile: a NUL byte; remove it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        line, column = max(error.lineno or 1, 1), max(error.offset or 1, 1)
        return Diagnostic(path, line, column, "syntax-error", f"the file does not compile: {error.msg}")
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        message = f"the file does not compile: {type(error).__name__}: {error}".removesuffix(": ")
        return Diagnostic(path, 1, 1, "syntax-error", message[:200])
    return None


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, str))

"""Scan a whole repository: which files count, what each declares, a cache keyed by content.

Only files under the test roots (`tests/`, or what `roots` of registry.yaml names) are looked at; a root that is
missing, or holds no test file, is an error: it would be a suite that is green for ever. `conftest.py` is exempt, and below a folder named `helpers` everything but
`test_*.py`, which pytest would run there too.
Symbolic links are not followed. A file without the bytes `register_` is never parsed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_ci.declare.cache import ScanCache
from miles_ci.declare.model import IMPLICIT_FOLDER, IMPLICIT_SUITE, Declaration, FileScan, Scan
from miles_ci.declare.reader import MARKER, decode, defines_tests, read_source
from miles_ci.declare.vocabulary import SHIPPED, Vocabulary
from miles_ci.errors import Diagnostic
from miles_ci.metric_bound import MetricBound

DEFAULT_ROOTS = ("tests",)
# A syntax tree takes about a hundred times the bytes of its source.
MAX_PARSED_BYTES = 4 << 20
# What pytest gives a meaning in a path, what separates parts of our own ids, and what no terminal shows.
_BAD_IN_NAMES = frozenset("[]:|#\\")
# Hidden folders and caches never hold test files; looking into them costs time on a large tree.
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})


def scan_tree(
    root: Path | str,
    *,
    roots: Sequence[str] = DEFAULT_ROOTS,
    vocabulary: Vocabulary = SHIPPED,
    cache_dir: Path | None = None,
) -> Scan:
    """Every declaration under `root/<one of roots>`; with `cache_dir` unchanged files are not parsed again.

    Never stops early and never raises for the content of a file. `Scan.empty_roots` says which roots have no test.
    """
    base = os.fspath(root)
    rules = _Rules(tuple(roots), vocabulary)
    cache = ScanCache.load(cache_dir)
    declarations: list[Declaration] = []
    metric_bounds: list[MetricBound] = []
    errors: list[Diagnostic] = []
    files: list[str] = []
    for path in test_tree_files(base, roots):
        problem = bad_name(path)
        if problem is not None:
            files.append(problem.path)
            errors.append(problem)
            continue
        try:
            with open(os.path.join(base, path), "rb") as stream:
                data = stream.read()
        except OSError as error:
            errors.append(Diagnostic(path, 1, 1, "unreadable", f"cannot be read: {error.strerror or error}"))
            continue
        if is_test_file(path):
            files.append(path)
            found = _read_test_file(path, data, cache, rules)
        else:
            found = _read_other_file(path, data, cache, rules)
        if found.errors:
            errors.extend(found.errors)
        else:
            declarations.extend(found.declarations)
            metric_bounds.extend(found.metric_bounds)
    cache.save(cache_dir)
    empty = tuple(root for root in roots if not any(path.startswith(f"{root}/") for path in files))
    return Scan(base, tuple(declarations), tuple(metric_bounds), tuple(sorted(errors)), tuple(files), empty)


@dataclass(frozen=True)
class _Rules:
    """What decides, besides its own content, how a file is read."""

    roots: tuple[str, ...]
    vocabulary: Vocabulary

    def is_implicit(self, path: str) -> bool:
        return any(path.startswith(f"{root}/{IMPLICIT_FOLDER}/") for root in self.roots)

    def key(self, path: str, data: bytes) -> str:
        """The name decides which rules apply, so it is part of the key; the folder is not."""
        kind = "test" if is_test_file(path) else "other"
        made = hashlib.blake2b(data, digest_size=32)
        made.update(f"\0{kind}\0{','.join(self.vocabulary.backends)}".encode())
        return made.hexdigest()


def test_tree_files(base: str, roots: Sequence[str]) -> list[str]:
    """Non-exempt Python files under the roots, relative, with `/`, sorted. A root behind a link is not followed."""
    found: list[str] = []
    stack = [(root, False) for root in roots if not os.path.islink(os.path.join(base, root))]
    while stack:
        folder, helpers = stack.pop()
        try:
            entries = list(os.scandir(os.path.join(base, folder)))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            name = entry.name
            if entry.is_dir(follow_symlinks=False):
                if name not in _SKIPPED_FOLDERS and not name.startswith("."):
                    stack.append((f"{folder}/{name}", helpers or name == "helpers"))
            elif not name.endswith(".py") or name == "conftest.py" or (helpers and not is_test_file(name)):
                continue
            elif entry.is_file(follow_symlinks=False):
                found.append(f"{folder}/{name}")
    found.sort()
    return found


def bad_name(path: str) -> Diagnostic | None:
    """Why a file of this name could not be run: as an argument it would make pytest drop every other file too."""
    bad = next((letter for letter in path if letter in _BAD_IN_NAMES or not letter.isprintable()), None)
    if bad is None:
        return None
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in path)
    message = f"{bad!r} in a file name cannot be addressed in a pytest run; rename the file or folder"
    return Diagnostic(shown, 1, 1, "bad-name", message)


def is_test_file(path: str) -> bool:
    return path.rpartition("/")[2].startswith("test_")


def _read_test_file(path: str, data: bytes, cache: ScanCache, rules: _Rules) -> FileScan:
    if MARKER in data:
        if len(data) > MAX_PARSED_BYTES:
            message = f"larger than {MAX_PARSED_BYTES >> 20} MiB, too large to be parsed; move its data to another file"
            return FileScan(errors=(Diagnostic(path, 1, 1, "too-large", message),))
        key = rules.key(path, data)
        found = cache.get(key, path)
        if found is None:
            found = read_source(path, data, rules.vocabulary)
            cache.put(key, found)
        cache.used(key)
        if found.declarations or found.errors:
            return found
    else:
        found = FileScan()
        if not data.isascii():
            _, problem = decode(path, data)
            if problem is not None:
                return FileScan(errors=(problem,))
    if rules.is_implicit(path):
        implicit = Declaration(path=path, backend="cpu", suite=IMPLICIT_SUITE, implicit=True)
        return FileScan((implicit,), found.metric_bounds)
    calls = list(rules.vocabulary.backend_of)
    message = f"declares no suite: call {', '.join(calls[:-1])} or {calls[-1]} at the top level"
    return FileScan(errors=(Diagnostic(path, 1, 1, "not-declared", message),))


def _read_other_file(path: str, data: bytes, cache: ScanCache, rules: _Rules) -> FileScan:
    """A file under a test root that pytest would not collect here: it may hold neither tests nor declarations."""
    if b"def test_" not in data and MARKER not in data:
        return FileScan()
    key = rules.key(path, data)
    found = cache.get(key, path)
    if found is None:
        found = _judge_other_file(path, data, rules.vocabulary)
        cache.put(key, found)
    cache.used(key)
    return found


def _judge_other_file(path: str, data: bytes, vocabulary: Vocabulary) -> FileScan:
    errors: list[Diagnostic] = []
    tests = defines_tests(path, data)
    if isinstance(tests, Diagnostic):
        errors.append(tests)
    elif tests is not None:
        line, column, name = tests
        message = f"{name} would never run: rename the file to test_*.py, or move helpers to conftest.py or helpers/"
        errors.append(Diagnostic(path, line, column, "misplaced-test", message))
    if not errors and MARKER in data:
        found = read_source(path, data, vocabulary)
        errors.extend(found.errors)
        items: list[Declaration | MetricBound] = [*found.declarations, *found.metric_bounds]
        for item in items:
            message = "a declaration in a file that is no test: rename the file to test_*.py or remove the call"
            errors.append(Diagnostic(path, item.line, item.column, "misplaced-declaration", message))
    return FileScan(errors=tuple(errors))

"""The repository as every command sees it: root, fleet, scan, catalog, durations. Loaded once, on demand."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path

from miles_ci.declare.cache_folder import cache_folder
from miles_ci.declare.model import Scan
from miles_ci.errors import ConfigErrors, Diagnostic, UsageError
from miles_ci.plan.durations import TABLE, Durations
from miles_ci.registry.load import REGISTRY, Reading, read_fleet
from miles_ci.registry.model import Fleet
from miles_ci.select.registrations import Catalog, build_catalog


@dataclass(frozen=True)
class Workspace:
    """`root` is the folder that holds registry.yaml; `today` is injectable for tests."""

    root: Path
    registry: Path
    today: date | None = None

    @classmethod
    def find(cls, root: str | None = None, registry: str | None = None) -> Workspace:
        """The workspace of `root`, by default the nearest folder upwards that holds registry.yaml."""
        if root is None:
            here = Path.cwd()
            candidates = [folder for folder in (here, *here.parents) if (folder / REGISTRY).is_file()]
            base = candidates[0] if candidates else here
        else:
            base = Path(root)
            if not base.is_dir():
                raise UsageError(f"--root {root}: no such folder")
        path = Path(registry) if registry is not None else base / REGISTRY
        return cls(base, path)

    @property
    def shown_registry(self) -> str:
        try:
            return self.registry.resolve().relative_to(self.root.resolve()).as_posix()
        except ValueError:
            return str(self.registry)

    @cached_property
    def reading(self) -> Reading:
        """The registry with its findings and places. Raises `UsageError` when it cannot be read."""
        try:
            source = self.registry.read_bytes()
        except OSError as error:
            hint = "run from the repository, name it with --root or --registry, or start one with `miles-ci init`"
            raise UsageError(f"{self.registry}: the registry cannot be read ({error.strerror}); {hint}") from error
        return read_fleet(source, self.shown_registry, today=self.today)

    @cached_property
    def fleet(self) -> Fleet:
        """Raises `ConfigErrors` with every error of the registry."""
        if self.reading.fleet is None:
            raise ConfigErrors(self.reading.errors)
        return self.reading.fleet

    @property
    def cache_dir(self) -> Path | None:
        return cache_folder(self.root)

    @cached_property
    def scan(self) -> Scan:
        """Every declaration under the test roots, read with the backends of the registry."""
        from miles_ci.declare.tree import scan_tree
        from miles_ci.declare.vocabulary import Vocabulary

        vocabulary = Vocabulary.adding(self.reading.backends)
        return scan_tree(self.root, roots=self.reading.roots, vocabulary=vocabulary, cache_dir=self.cache_dir)

    @property
    def without_tests(self) -> tuple[Diagnostic, ...]:
        """One finding for each test root that is missing or holds no test: it would be green for ever."""
        return tuple(self._without_tests(root) for root in self.scan.empty_roots)

    def _without_tests(self, root: str) -> Diagnostic:
        index = self.reading.roots.index(root)
        line, column = self.reading.document.place(("roots", index))
        folder = self.root / root
        if folder.is_symlink():
            what = "is a symbolic link, which is not followed; name the folder itself"
        elif not folder.is_dir():
            what = "no such folder; correct `roots`, or make it and put a test into it"
        else:
            what = "holds no test file (test_*.py), so nothing would ever run; add one or correct `roots`"
        return Diagnostic(self.shown_registry, line, column, "no-test-files", f"roots: '{root}' {what}")

    @property
    def table(self) -> str:
        """The committed durations, in the first test root."""
        return f"{self.reading.roots[0]}/{TABLE}"

    @cached_property
    def durations(self) -> Durations:
        """Raises `UsageError` when the committed table is corrupt."""
        return Durations.load(self.root / self.table)

    @cached_property
    def catalog(self) -> Catalog:
        """Raises `ConfigErrors` when a test root has no test."""
        fleet = self.fleet
        if self.without_tests:
            raise ConfigErrors(self.without_tests)
        return build_catalog(self.scan, fleet, observed=self.durations.knows, today=self.today)

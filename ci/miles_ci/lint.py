"""Everything that can be wrong with what is written down, in one report: registry, schema, durations, tests.

`lint` returns all findings sorted by file and line; nothing stops at the first. Workflow files are linted
by `miles_ci.workflows.lint`, which the command adds with `--workflows`.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from miles_ci.declare.syntax import syntax_findings
from miles_ci.errors import Diagnostic, UsageError
from miles_ci.registry.load import read_fleet
from miles_ci.registry.schema import SCHEMA_PATH, schema_findings, schema_text
from miles_ci.select.diff import DiffError, contents_at, merge_base_with
from miles_ci.workspace import Workspace


@dataclass(frozen=True)
class LintReport:
    """All findings, what was counted, and checks that could not run here, with the reason."""

    findings: tuple[Diagnostic, ...]
    files: int
    declarations: int
    not_run: tuple[str, ...]

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        return tuple(item for item in self.findings if item.severity == "error")


def lint(space: Workspace, *, base: str | None = None) -> LintReport:
    """Check the workspace. With `base`, exemptions that are new since then may not have passed already."""
    today = space.today or date.today()
    findings: list[Diagnostic] = list(space.reading.findings)
    not_run: list[str] = []
    findings.extend(_schema(space, not_run))
    files = declarations = 0
    findings.extend(space.without_tests)
    if space.reading.fleet is not None and not space.without_tests:
        try:
            catalog = space.catalog
        except UsageError as error:
            findings.append(Diagnostic(space.table, 1, 1, "durations", str(error)))
        else:
            files, declarations = len(space.scan.files), len(catalog.registrations)
            findings.extend(catalog.errors)
            findings.extend(catalog.findings)
            findings.extend(_links(space))
    else:
        # Declarations that need no fleet are still checked, so that one report has everything.
        findings.extend(space.scan.errors)
        files = len(space.scan.files)
        why = "the registry has errors" if space.reading.fleet is None else "a test root has no test"
        not_run.append(f"declarations against the fleet: {why}")
    faulty = frozenset(space.scan.faulty)
    findings.extend(
        syntax_findings(space.root, (path for path in space.scan.files if path not in faulty), space.cache_dir)
    )
    if base is not None:
        findings.extend(_passed_at_introduction(space, base, today))
    return LintReport(tuple(sorted(set(findings))), files, declarations, tuple(not_run))


def _schema(space: Workspace, not_run: list[str]) -> Iterator[Diagnostic]:
    path = space.root / SCHEMA_PATH
    try:
        committed = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        committed = None
    if committed != schema_text():
        what = "is missing" if committed is None else "differs from the model"
        yield Diagnostic(SCHEMA_PATH, 1, 1, "schema-drift", f"{what}; run `miles-ci lint --write-schema`")
    if importlib.util.find_spec("jsonschema") is None:
        not_run.append("registry against the JSON Schema: jsonschema is not installed")
        return
    data = space.reading.document.data
    if data is not None:
        for keys, message in schema_findings(data):
            line, column = space.reading.document.place(keys)
            dotted = ".".join(map(str, keys)) or "registry"
            if not space.reading.errors:
                # With errors of the model the schema would only repeat them in other words.
                yield Diagnostic(space.shown_registry, line, column, "schema", f"{dotted}: {message}")


def _links(space: Workspace) -> Iterator[Diagnostic]:
    """Links are not followed, so that no file counts twice; a test behind one must not be missed unnoticed."""
    walks = (os.walk(space.root / root) for root in space.reading.roots)
    for folder, folders, names in itertools.chain.from_iterable(walks):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in [*folders, *sorted(names)]:
            path = Path(folder, name)
            if path.is_symlink() and (path.is_dir() or (name.startswith("test_") and name.endswith(".py"))):
                message = (
                    "a symbolic link is not followed: what lies behind it runs under its own path only, or never, "
                    "though pytest alone runs it here; put a copy, or an import, in its place"
                )
                where = path.relative_to(space.root).as_posix()
                yield Diagnostic(where, 1, 1, "symbolic-link", message)


def _passed_at_introduction(space: Workspace, base: str, today: date) -> Iterator[Diagnostic]:
    """Exemptions whose `until` has passed and that the base does not have in the same words."""
    try:
        revision = merge_base_with(space.root, base)
        paths = sorted({space.shown_registry, *(item.path for item in space.scan.declarations if not item.implicit)})
        old = contents_at(space.root, revision, paths)
    except DiffError as error:
        raise UsageError(f"--base {base}: {error}") from error
    day = today.isoformat()
    for item in space.scan.declarations:
        for field in ("disabled", "unstable"):
            exemption = getattr(item, field)
            if exemption is None or exemption.until >= day:
                continue
            if exemption.until.encode() not in old.get(item.path, b""):
                line, column = item.place(field)
                message = f"{field}: until {exemption.until} had passed when it was introduced"
                yield Diagnostic(item.path, line, column, "until-in-past", message)
    if space.reading.fleet is None:
        return
    before = read_fleet(old[space.shown_registry], today=today).fleet if space.shown_registry in old else None
    for name, pool in space.reading.fleet.pools.items():
        known = before.pools.get(name) if before is not None else None
        same = known is not None and known.disabled == pool.disabled
        if pool.disabled is not None and pool.disabled.until < day and not same:
            line, column = space.reading.document.place(("pools", name, "disabled", "until"))
            message = f"pools.{name}.disabled.until: {pool.disabled.until} had passed when it was introduced"
            yield Diagnostic(space.shown_registry, line, column, "until-in-past", message)

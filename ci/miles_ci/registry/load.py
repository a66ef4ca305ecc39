"""From the bytes of `registry.yaml` to a `Fleet`, collecting every error with its place."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from miles_ci.errors import ConfigErrors, Diagnostic, UsageError, suggestion
from miles_ci.registry import model
from miles_ci.registry.checks import check_references
from miles_ci.registry.yaml_source import Document, Keys, read_document

REGISTRY = "registry.yaml"

_SECTIONS: dict[str, type[BaseModel]] = {
    "backends": model.Backend,
    "hardware": model.Hardware,
    "pools": model.Pool,
    "suites": model.Suite,
    "cadences": model.Cadence,
    "images": model.Image,
    "retry": model.RetryRule,
    "notify": model.Notification,
}


@dataclass(frozen=True)
class Reading:
    """One reading of a registry: all findings, the places, and the fleet when no error stands against it.

    A date that has passed is an error for lint only: forgetting to renew an exemption must not stop the
    whole CI one morning.
    """

    fleet: model.Fleet | None
    findings: tuple[Diagnostic, ...]
    document: Document

    @property
    def roots(self) -> tuple[str, ...]:
        """Where tests are; of a registry with errors what can be read, so that one report has everything."""
        return self._read_anyway("roots", (model.DEFAULT_ROOT,))

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the backends that the registry adds; of a registry with errors what can be read."""
        return self._read_anyway("backends", ())

    def _read_anyway(self, section: str, default: tuple[str, ...]) -> tuple[str, ...]:
        if self.fleet is not None:
            return tuple(getattr(self.fleet, section))
        given = self.document.data.get(section) if isinstance(self.document.data, dict) else None
        kind = TypeAdapter(model.Root if section == "roots" else model.BackendName)
        sound = []
        for item in given if isinstance(given, list | dict) else ():
            try:
                sound.append(kind.validate_python(item, strict=True))
            except ValidationError:
                continue
        return tuple(sound) or default

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        return tuple(item for item in self.findings if item.severity == "error")


def load_fleet(path: Path | str, *, shown_as: str | None = None, today: date | None = None) -> model.Fleet:
    """Read and check a registry file.

    Raises `ConfigErrors` with every error, each with its place; warnings are dropped here (lint shows them).
    `shown_as` is the path in messages, by default the file's name.
    """
    path = Path(path)
    try:
        source = path.read_bytes()
    except OSError as error:
        hint = "; run from the repository root or name it with --registry" if path.name == REGISTRY else ""
        raise UsageError(f"{path}: the registry cannot be read: {error.strerror or error}{hint}") from error
    reading = read_fleet(source, shown_as or path.name, today=today)
    if reading.fleet is None:
        raise ConfigErrors(reading.errors)
    return reading.fleet


def _blocks(item: Diagnostic) -> bool:
    return item.severity == "error" and item.code != "until-expired"


def read_fleet(source: bytes, shown_as: str = REGISTRY, *, today: date | None = None) -> Reading:
    """Read, validate and cross-check; never raises for the content."""
    document = read_document(shown_as, source)
    fleet: model.Fleet | None = None
    if document.data is None:
        if not document.errors:
            document.error((), "wrong-type", "the registry must be a mapping")
    elif not isinstance(document.data, dict):
        document.error((), "wrong-type", "the registry must be a mapping")
    else:
        try:
            fleet = model.Fleet.model_validate(document.data)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                _report(document, item)
        check_references(document, _sound_entries(document.data), today or date.today())
    findings = tuple(sorted(set(document.errors)))
    sound = fleet if not any(map(_blocks, findings)) else None
    return Reading(sound, findings, document)


def _sound_entries(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Entries that are well-formed by themselves, so that one bad entry hides no error of another."""
    result: dict[str, dict[str, Any]] = {}
    for section, kind in _SECTIONS.items():
        entries = data.get(section)
        result[section] = {}
        if isinstance(entries, dict):
            for name, value in entries.items():
                try:
                    result[section][name] = kind.model_validate(value)
                except ValidationError:
                    continue
    labels = data.get("labels")
    for group, kind in (("domain", model.Label), ("scope", model.ScopeLabel), ("behaviour", model.Label)):
        entries = labels.get(group) if isinstance(labels, dict) else None
        result[f"labels.{group}"] = {}
        for name, value in entries.items() if isinstance(entries, dict) else ():
            try:
                result[f"labels.{group}"][name] = kind.model_validate(value)
            except ValidationError:
                continue
    return result


_MISSING, _EXTRA, _LITERAL = "missing", "extra_forbidden", "literal_error"


def _report(document: Document, item: Any) -> None:
    """One pydantic error as a diagnostic with place and nearest name."""
    loc: Keys = tuple(part for part in item["loc"] if part != "[key]")
    kind = item["type"]
    dotted = ".".join(map(str, loc))
    if kind == _MISSING:
        document.error(loc, "missing-field", f"{dotted}: is required")
    elif kind == _EXTRA:
        if len(loc) == 3 and loc[0] == "suites" and loc[2] == "gate":
            document.error(loc, "unknown-key", f"{dotted}: the key is called `needs` now; rename it", of_key=True)
            return
        known = _fields_at(loc[:-1])
        document.error(loc, "unknown-key", f"{dotted}: unknown key{suggestion(str(loc[-1]), known)}", of_key=True)
    elif kind == _LITERAL:
        value = item["input"]
        choices = _choices(item["ctx"]["expected"])
        near = suggestion(str(value), choices)
        in_key = len(item["loc"]) != len(loc)
        document.error(loc, "unknown-value", f"{dotted}: {value!r:.80} is not allowed{near}", of_key=in_key)
    else:
        code = "wrong-type" if kind.endswith(("_type", "_parsing")) else "bad-value"
        message = _unseen(item["input"]) or item["msg"][0].lower() + item["msg"][1:]
        shown = "" if isinstance(item["input"], dict | list) else f" (got {item['input']!r:.60})"
        document.error(loc, code, f"{dotted}: {message}{shown}", of_key=len(item["loc"]) != len(loc))


def _unseen(value: Any) -> str | None:
    """A text that no one can check by reading it: names the character instead of the rule."""
    if not isinstance(value, str):
        return None
    bad = next((letter for letter in value if not letter.isprintable()), None)
    return f"the character {bad!a} cannot be seen; remove it" if bad is not None else None


def _choices(expected: str) -> list[str]:
    """The names in pydantic's "'a', 'b' or 'c'"."""
    return [part for index, part in enumerate(expected.split("'")) if index % 2]


def _fields_at(loc: Keys) -> list[str]:
    """Field names of the model class that describes the entry at `loc`."""
    current: Any = model.Fleet
    for part in loc:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(part))
            if field is None:
                return []
            current = field.annotation
        else:
            current = get_args(current)[-1] if get_args(current) else None
        current = _without_none(current)
    if isinstance(current, type) and issubclass(current, BaseModel):
        return list(current.model_fields)
    return []


def _without_none(annotation: Any) -> Any:
    arguments = [item for item in get_args(annotation) if item is not type(None)]
    is_optional = len(arguments) == 1 and len(get_args(annotation)) == 2
    return arguments[0] if is_optional else annotation

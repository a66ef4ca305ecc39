"""What a workflow step reads and writes: event payload, outputs, summary. Fields are checked by name."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_ci.bot.github import SUMMARY_LIMIT
from miles_ci.errors import UsageError
from miles_ci.report.strict_json import loads


def event(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The payload of the event that started this run."""
    path = (os.environ if environ is None else environ).get("GITHUB_EVENT_PATH")
    if not path:
        raise UsageError("environment: GITHUB_EVENT_PATH is not set")
    try:
        data = loads(Path(path).read_bytes(), what="event payload")
    except OSError as error:
        raise UsageError(f"event payload: {error}") from error
    if not isinstance(data, dict):
        raise UsageError("event payload: not an object")
    return data


def field(data: Mapping[str, Any], path: str, kind: type = object) -> Any:
    """A field by its dotted path; `UsageError` (exit 2) names the one that is missing or of another kind."""
    value: Any = data
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise UsageError(f"event payload: field {path!r} is missing")
        value = value[part]
    if kind is not object and (not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
        raise UsageError(f"event payload: field {path!r} is {type(value).__name__}, expected {kind.__name__}")
    return value


def variable(name: str, environ: Mapping[str, str] | None = None, *, required: bool = True) -> str:
    value = (os.environ if environ is None else environ).get(name, "")
    if required and not value:
        raise UsageError(f"environment: {name} is not set")
    return value


def write_outputs(values: Mapping[str, str], environ: Mapping[str, str] | None = None) -> None:
    """Append to GITHUB_OUTPUT; values with newlines use a random delimiter, so they cannot forge others."""
    path = (os.environ if environ is None else environ).get("GITHUB_OUTPUT")
    lines = []
    for name, value in values.items():
        if "\n" in value or "\r" in value:
            mark = f"end_{uuid.uuid4().hex}"
            lines.append(f"{name}<<{mark}\n{value}\n{mark}\n")
        else:
            lines.append(f"{name}={value}\n")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(lines)
    else:
        print("".join(lines), end="")


def write_summary(markdown: str, environ: Mapping[str, str] | None = None) -> None:
    """Append to the job summary, cut at GitHub's 1 MiB."""
    path = (os.environ if environ is None else environ).get("GITHUB_STEP_SUMMARY")
    data = markdown.encode()
    if len(data) > SUMMARY_LIMIT:
        note = "\n\n… (shortened at 1 MiB)\n".encode()
        data = data[: SUMMARY_LIMIT - len(note)].decode(errors="ignore").encode() + note
    if path:
        with open(path, "ab") as file:
            file.write(data + b"\n")
    else:
        print(data.decode())

"""The first line of every comment we write, by which we find it again.

`<!-- miles-ci {"v":1,"kind":"rerun","req":"…","run":7,"attempt":1,"state":"running"} -->`

A marker counts only in a comment whose author is our bot: anybody can type one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_ci.report.strict_json import StrictJsonError, loads

VERSION = 1
_LINE = re.compile(r"<!-- miles-ci (\{[^\n]{0,2000}\}) -->")


@dataclass(frozen=True)
class Marker:
    """`kind` rerun, card, help or lint; `req` the request; `run` and `attempt` of the run that wrote it last."""

    kind: str
    req: str = ""
    run: int = 0
    attempt: int = 0
    state: str = ""
    sha: str = ""

    def line(self) -> str:
        values = {"v": VERSION, "kind": self.kind, "req": self.req, "run": self.run, "attempt": self.attempt}
        values |= {"state": self.state, "sha": self.sha}
        # "--" would end the HTML comment early.
        text = json.dumps(values, separators=(",", ":")).replace("--", "-\\u002d")
        return f"<!-- miles-ci {text} -->"


def parse_marker(body: str | None) -> Marker | None:
    """The marker of a body, None when its first line is none or is malformed."""
    found = _LINE.fullmatch((body or "").split("\n", 1)[0].rstrip("\r"))
    if not found:
        return None
    try:
        data = loads(found[1])
    except StrictJsonError:
        return None
    if not isinstance(data, dict) or data.get("v") != VERSION or not isinstance(data.get("kind"), str):
        return None
    run, attempt = data.get("run", 0), data.get("attempt", 0)
    if type(run) is not int or type(attempt) is not int:
        return None
    return Marker(
        data["kind"], str(data.get("req", "")), run, attempt, str(data.get("state", "")), str(data.get("sha", ""))
    )


def ours(
    comments: Iterable[Mapping[str, Any]], bot_id: int, kind: str, req: str = ""
) -> list[tuple[Mapping[str, Any], Marker]]:
    """Comments by our bot with a marker of a kind (and request), lowest id first."""
    found = []
    for comment in comments:
        if (comment.get("user") or {}).get("id") != bot_id:
            continue
        marker = parse_marker(comment.get("body"))
        if marker is not None and marker.kind == kind and (not req or marker.req == req):
            found.append((comment, marker))
    return sorted(found, key=lambda item: item[0]["id"])

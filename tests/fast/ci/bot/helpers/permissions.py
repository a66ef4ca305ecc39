"""Which permission of a token each endpoint asks for, by GitHub's "Permissions required for GitHub Apps"."""

from __future__ import annotations

import re
from collections.abc import Mapping

CONVERSATION = ("issues", "pull-requests")
# Method, path inside the repository -> permissions of which one is enough, and its level.
NEEDS: list[tuple[str, str, tuple[str, ...], str]] = [
    ("GET", r"/pulls/\d+", ("pull-requests",), "read"),
    ("GET", r"/commits/[0-9a-f]{40}/pulls", ("pull-requests",), "read"),
    ("GET", r"/issues/.*", CONVERSATION, "read"),
    ("(POST|PATCH|DELETE)", r"/issues/.*", CONVERSATION, "write"),
    ("GET", r"/commits/[0-9a-f]{40}/check-runs", ("checks",), "read"),
    ("(POST|PATCH)", r"/check-runs.*", ("checks",), "write"),
    ("GET", r"/actions/runners", ("administration",), "read"),
    ("GET", r"/actions/.*", ("actions",), "read"),
    ("POST", r"/actions/.*", ("actions",), "write"),
    # Metadata, which every token may read.
    ("GET", r"/collaborators/[^/]+/permission", (), "read"),
]


def lacking(method: str, path: str, granted: Mapping[str, str]) -> str | None:
    """What a token with these permissions lacks for a request, None when it may make it."""
    for verb, pattern, names, level in NEEDS:
        if re.fullmatch(verb, method) and re.fullmatch(pattern, path):
            enough = ("write",) if level == "write" else ("read", "write")
            return None if not names or any(granted.get(name) in enough for name in names) else f"{names[0]}: {level}"
    return f"an entry for {method} {path} in NEEDS"

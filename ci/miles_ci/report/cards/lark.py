"""The Lark card: signed request, schema 2.0, at most 20,480 bytes, delivered with bounded retries.

Success is what the answer's JSON says, whatever the HTTP status. A failed notification is reported and never
changes a verdict.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from miles_ci.report.cards.model import Card, RowGroup, hidden_text, reason_text, skipped_lines, totals
from miles_ci.report.escape import one_line
from miles_ci.report.strict_json import StrictJsonError, loads

LIMIT = 20_480
SHORT_REASON = 120
MAX_TESTS = 10
FEWER_LINKS = (160, 120, 80, 40, 20, 10)
_COLOUR = {"success": "green", "failure": "red", "cancelled": "grey"}
RETRY_CODES = {11232}
FINAL_CODES = {
    19001: "the webhook address is not valid",
    19022: "this sender's address is not on the allow-list",
    19024: "the text lacks the keyword that the bot demands",
    9499: "the request is malformed or too large",
}
STALE_SIGNATURE = 19021
_ENTITIES = {ord(char): f"&#{ord(char)};" for char in "&<>\\`*_~[]()#!|@"}
DELAYS_S = (1.0, 2.0, 4.0, 8.0)
ATTEMPTS = 5


def sign(timestamp: int, secret: str) -> str:
    """base64(HMAC-SHA256(key = "<timestamp>\\n<secret>", empty message)); seconds."""
    key = f"{timestamp}\n{secret}".encode()
    return base64.b64encode(hmac.new(key, b"", hashlib.sha256).digest()).decode()


def escape(text: str, limit: int = 280) -> str:
    """Plain text inside Lark Markdown: no formatting, no links, no `<at>`."""
    return one_line(text, limit).translate(_ENTITIES)


@dataclass(frozen=True)
class Shape:
    """How much is shown; the next shape shows less."""

    tests: int = MAX_TESTS
    reason: int = 280
    groups: int | None = None
    links: int | None = None


def _group(group: RowGroup, shape: Shape) -> dict[str, Any]:
    linked = group.jobs[: shape.links]
    links = " ".join(f"[{escape(job.name, 80)}]({job.url})" if job.url else escape(job.name, 80) for job in linked)
    if len(linked) < len(group.jobs):
        links += f" … and {len(group.jobs) - len(linked)} more jobs"
    lines = [f"**{len(group.jobs)} x** {links}" if len(group.jobs) > 1 else links]
    shown = group.analyses[: shape.tests]
    for item in shown:
        name = escape(item.test_name or "the job", 200)
        tags = f" ({', '.join(item.tags)})" if item.tags else ""
        lines.append(f"- {name}: {escape(reason_text(item.reason), shape.reason)}{tags}")
    if len(group.analyses) > len(shown):
        lines.append(f"- … and {len(group.analyses) - len(shown)} more tests")
    return {"tag": "markdown", "content": "\n".join(lines)}


def build(card: Card, shape: Shape | None = None) -> dict[str, Any]:
    """The card itself (`schema: "2.0"`)."""
    shape = shape or Shape()
    head = f"**{totals(card.report)}** · {escape(card.when, 40)} · [run]({card.url})"
    elements: list[dict[str, Any]] = [{"tag": "markdown", "content": head}]
    shown = card.shown if shape.groups is None else card.shown[: shape.groups]
    elements += [_group(group, shape) for group in shown]
    hidden = card.groups[len(shown) :]
    if hidden:
        elements.append({"tag": "markdown", "content": hidden_text(hidden)})
    if shape.groups is None:
        extra = [f"never executed: {escape(name)}" for name in card.report.never_executed[:MAX_TESTS]]
        extra += [f"skipped {escape(line)}" for line in skipped_lines(card.report.skipped)]
        extra += [f"flaky: {escape(name)}" for name in card.report.flaky[:MAX_TESTS]]
        extra += [escape(note) for note in card.notes]
        if extra:
            elements.append({"tag": "markdown", "content": "\n".join(f"- {line}" for line in extra)})
    header = {
        "title": {"tag": "plain_text", "content": one_line(card.title, 120)},
        "template": _COLOUR.get(card.result, "orange"),
    }
    return {"schema": "2.0", "config": {"wide_screen_mode": True}, "header": header, "body": {"elements": elements}}


def request(card: Card, timestamp: int, secret: str | None, *, limit: int = LIMIT) -> bytes:
    """The whole signed request as UTF-8 JSON of at most `limit` bytes.

    Shortened in this order: test lists, reasons to 120 characters, trailing groups, links of the first group; totals
    and the run link remain in every case.
    """
    shapes = [Shape(), Shape(tests=3), Shape(tests=1), Shape(tests=1, reason=SHORT_REASON)]
    shapes += [Shape(tests=1, reason=SHORT_REASON, groups=count) for count in range(len(card.shown), 0, -1)]
    shapes += [Shape(tests=1, reason=SHORT_REASON, groups=1, links=links) for links in FEWER_LINKS]
    shapes.append(Shape(tests=1, reason=SHORT_REASON, groups=0))
    data = b""
    for shape in shapes:
        body: dict[str, Any] = {"msg_type": "interactive", "card": build(card, shape)}
        if secret is not None:
            body |= {"timestamp": str(timestamp), "sign": sign(timestamp, secret)}
        data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        if len(data) <= limit:
            return data
    return data


@dataclass(frozen=True)
class Delivery:
    """`ok` or why not; `attempts` counts requests."""

    ok: bool
    message: str
    attempts: int


Post = Callable[[bytes], tuple[int, bytes]]


def deliver(
    card: Card, post: Post, *, secret: str | None, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Delivery:
    """Send, re-signing each attempt. `post` returns (status, body) and raises OSError when unanswered."""
    resigned = False
    message = "not sent"
    for attempt in range(1, ATTEMPTS + 1):
        try:
            status, body = post(request(card, int(clock()), secret))
        except OSError as error:
            status, body, message = 0, b"", f"no answer: {error}"
        code = _code(body)
        if code == 0:
            return Delivery(True, "delivered", attempt)
        if status:
            message = _message(status, code)
        if code in FINAL_CODES:
            return Delivery(False, message, attempt)
        if code == STALE_SIGNATURE:
            if resigned:
                return Delivery(False, message, attempt)
            resigned = True
            continue
        transient = status == 0 or status == 429 or status >= 500 or code in RETRY_CODES
        if not transient or attempt == ATTEMPTS:
            return Delivery(False, message, attempt)
        sleep(DELAYS_S[attempt - 1] + random.uniform(0, 0.5))
    return Delivery(False, message, ATTEMPTS)


def _code(body: bytes) -> int | None:
    """`code` or `StatusCode` of an answer; None when it is not the JSON we know."""
    try:
        data = loads(body, what="Lark's answer")
    except StrictJsonError:
        return None
    if not isinstance(data, dict):
        return None
    value = data.get("code", data.get("StatusCode"))
    return value if type(value) is int else None


def _message(status: int, code: int | None) -> str:
    if code is None:
        return f"HTTP {status} without a JSON code"
    known = FINAL_CODES.get(code) or {11232: "throttled", STALE_SIGNATURE: "the signature is stale or wrong"}.get(
        code, "refused"
    )
    return f"code {code}: {known} (HTTP {status})"


def is_weekly(when: datetime) -> bool:
    """Saturday in UTC is the weekly run's day."""
    return when.astimezone(timezone.utc).weekday() == 5

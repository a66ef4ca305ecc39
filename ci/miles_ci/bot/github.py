"""The GitHub REST client of the bots.

GET, PUT, PATCH and DELETE are repeated on lost connections, 5xx, 429 and rate-limited 403. A POST is repeated
only after its `proof` has shown that the first one left nothing behind. A plain 403, 404 or 422 is an answer.
The token is sent to the API's own host and nowhere else, and appears in no message.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from miles_ci.bot.budget import Budget
from miles_ci.bot.transport import MAX_BODY, Reply, Transport, TransportError
from miles_ci.errors import CiError, ExitCode, UsageError
from miles_ci.report.strict_json import loads

API_VERSION = "2022-11-28"
MAX_ATTEMPTS = 5
MAX_WAIT_S = 600.0
MAX_PAGES = 100
COMMENT_LIMIT = 65_536
CHECK_LIMIT = 65_535
SUMMARY_LIMIT = 1024 * 1024
DOWNLOAD_HOSTS = (".amazonaws.com", ".blob.core.windows.net", ".github.com", ".githubusercontent.com")


class GitHubError(CiError):
    """GitHub answered with an error, or did not answer within the retries. `status` 0: no answer."""

    exit_code = ExitCode.INFRA

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Client:
    """`repository` is owner/name. `sleep`, `clock` and `transport` are injectable for tests."""

    base_url: str
    repository: str
    token: str = field(repr=False)
    transport: Transport = field(default_factory=Transport)
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.time
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*", self.repository):
            raise UsageError(f"GITHUB_REPOSITORY {self.repository!r} is not owner/name")
        self.base_url = self.base_url.rstrip("/")
        self.budget = Budget(self.clock, self.sleep)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, token_name: str = "GITHUB_TOKEN") -> Client:
        env = os.environ if environ is None else environ
        missing = [name for name in ("GITHUB_REPOSITORY", token_name) if not env.get(name)]
        if missing:
            raise UsageError(f"environment: {missing[0]} is not set")
        return cls(env.get("GITHUB_API_URL") or "https://api.github.com", env["GITHUB_REPOSITORY"], env[token_name])

    # -- requests -------------------------------------------------------------------------------

    def get(self, path: str, **query: Any) -> Any:
        return self._json(self._repeat("GET", self.url(path, query)), path)

    def patch(self, path: str, body: Mapping[str, Any], *, before_repeat: Callable[[], None] | None = None) -> Any:
        """`before_repeat`: called before an unanswered or refused request is sent again; what it raises ends it."""
        return self._json(self._repeat("PATCH", self.url(path), body, before_repeat=before_repeat), path)

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._json(self._repeat("PUT", self.url(path), body), path)

    def delete(self, path: str) -> None:
        self._repeat("DELETE", self.url(path))

    def post(self, path: str, body: Mapping[str, Any], *, proof: Callable[[], Any | None] | None = None) -> Any:
        """Create something once.

        `proof` looks for what an earlier, unanswered attempt may have created and returns it, or None when it
        is proven absent. Without `proof` an unanswered POST is an error, never repeated.
        """
        problem = ""
        waited = 0.0
        for attempt in range(MAX_ATTEMPTS):
            reply, problem = self._once("POST", self.url(path), body)
            if reply is not None and reply.status < 400:
                return self._json(reply, path)
            if reply is not None and not _is_transient(reply):
                raise self._error(reply, "POST", path)
            limited = reply is not None and reply.status in (403, 429)
            if not limited:  # 5xx or no answer: it may have been carried out
                if proof is None:
                    break
                found = proof()
                if found is not None:
                    return found
            waited = self._pause(reply, attempt, waited)
            if waited > MAX_WAIT_S:
                break
        raise GitHubError(f"POST {path}: {problem or 'gave up'}")

    def pages(self, path: str, key: str | None = None, **query: Any) -> Iterator[Any]:
        """Items of all pages; `key` names the list inside an object. More than 100 pages is an error."""
        url: str | None = self.url(path, {"per_page": 100, **query})
        for _ in range(MAX_PAGES):
            if url is None:
                return
            reply = self._repeat("GET", url)
            data = self._json(reply, path)
            yield from data[key] if key else data
            url = self._next(reply)
        if url is not None:
            raise GitHubError(f"GET {path}: more than {MAX_PAGES} pages")

    def download(self, path: str, *, limit: int = MAX_BODY) -> Reply:
        """Bytes behind a redirect to a storage host: no token there, a range, a size limit."""
        reply = self._repeat("GET", self.url(path), accept_redirect=True)
        if reply.status not in (301, 302, 303, 307, 308):
            return reply
        target = reply.headers.get("location", "")
        host = urlsplit(target).hostname or ""
        if not self._may_download(host, urlsplit(target).scheme):
            raise GitHubError(f"GET {path}: refused to follow a redirect to {host or 'nowhere'}")
        headers = {"user-agent": "miles-ci", "range": f"bytes=0-{limit - 1}"}
        for attempt in range(MAX_ATTEMPTS):
            try:
                found = self.transport.send("GET", target, headers, limit=limit)
            except TransportError:
                found = Reply(0, {}, b"")
            if found.status in (200, 206):
                total = re.search(r"/(\d+)$", found.headers.get("content-range", ""))
                cut = found.truncated or (total is not None and int(total[1]) > len(found.body))
                return Reply(200, found.headers, found.body, cut)
            if found.status and found.status < 500:
                break
            self._pause(found, attempt, 0.0)
        raise GitHubError(f"GET {path}: the storage host answered {found.status}", found.status)

    def _may_download(self, host: str, scheme: str) -> bool:
        if host == urlsplit(self.base_url).hostname:
            return scheme == urlsplit(self.base_url).scheme
        return scheme == "https" and host.endswith(DOWNLOAD_HOSTS)

    # -- inside ---------------------------------------------------------------------------------

    def url(self, path: str, query: Mapping[str, Any] | None = None) -> str:
        """Absolute address; `{repo}` is ours. Every other part of a path must be quoted by the caller."""
        full = self.base_url + path.replace("{repo}", f"/repos/{self.repository}")
        given = {name: value for name, value in (query or {}).items() if value is not None}
        return f"{full}?{urlencode(given)}" if given else full

    def _headers(self) -> dict[str, str]:
        return {
            "accept": "application/vnd.github+json",
            "authorization": f"Bearer {self.token}",
            "user-agent": "miles-ci",
            "x-github-api-version": API_VERSION,
        }

    def _once(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> tuple[Reply | None, str]:
        if urlsplit(url).netloc != urlsplit(self.base_url).netloc:
            raise GitHubError(f"{method}: {urlsplit(url).hostname} is not the API's host")
        self.budget.spend(method)
        headers, content = self._headers(), None
        if body is not None:
            headers["content-type"] = "application/json"
            content = json.dumps(body, allow_nan=False).encode()
        try:
            reply = self.transport.send(method, url, headers, content)
        except TransportError as error:
            return None, str(error)
        return reply, f"status {reply.status}"

    def _repeat(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None = None,
        *,
        accept_redirect: bool = False,
        before_repeat: Callable[[], None] | None = None,
    ) -> Reply:
        waited, problem, reply = 0.0, "", None
        path = urlsplit(url).path
        for attempt in range(MAX_ATTEMPTS):
            if attempt and before_repeat is not None:
                before_repeat()
            reply, problem = self._once(method, url, body)
            if reply is not None and (reply.status < 300 or (accept_redirect and reply.status < 400)):
                return reply
            if reply is not None and not _is_transient(reply):
                raise self._error(reply, method, path)
            if attempt + 1 < MAX_ATTEMPTS:
                waited = self._pause(reply, attempt, waited)
                if waited > MAX_WAIT_S:
                    break
        raise GitHubError(f"{method} {path}: {problem} after {attempt + 1} attempts", reply.status if reply else 0)

    def _pause(self, reply: Reply | None, attempt: int, waited: float) -> float:
        """Sleep as long as GitHub asks; returns the total wait, which may exceed the limit without sleeping."""
        wait: float = 2.0**attempt + random.uniform(0, 0.5)
        if reply is not None and reply.status in (403, 429):
            wait = 60.0 * 2.0**attempt
            if reply.headers.get("retry-after", "").isdigit():
                wait = float(reply.headers["retry-after"])
            elif reply.headers.get("x-ratelimit-reset", "").isdigit():
                wait = max(float(reply.headers["x-ratelimit-reset"]) - self.clock(), 1.0)
        if waited + wait <= MAX_WAIT_S:
            self.sleep(wait)
        return waited + wait

    def _next(self, reply: Reply) -> str | None:
        for part in reply.headers.get("link", "").split(","):
            found = re.fullmatch(r'\s*<([^>]+)>\s*;.*\brel="next".*', part)
            if found:
                if urlsplit(found[1]).netloc != urlsplit(self.base_url).netloc:
                    raise GitHubError("pagination points to another host")
                return found[1]
        return None

    def _json(self, reply: Reply, path: str) -> Any:
        if reply.truncated:
            raise GitHubError(f"{path}: the answer is larger than {MAX_BODY} bytes")
        return loads(reply.body, what=f"answer of {path}") if reply.body else None

    def _error(self, reply: Reply, method: str, path: str) -> GitHubError:
        try:
            message = str(loads(reply.body)["message"])[:300]
        except (CiError, KeyError, TypeError):
            message = ""
        return GitHubError(f"{method} {path}: {reply.status} {message}".rstrip(), reply.status)


def _is_transient(reply: Reply) -> bool:
    if reply.status >= 500 or reply.status == 429:
        return True
    if reply.status != 403:
        return False
    exhausted = reply.headers.get("x-ratelimit-remaining") == "0"
    return exhausted or "retry-after" in reply.headers or b"secondary rate limit" in reply.body


def quoted(value: str) -> str:
    """A value inside a path."""
    return quote(value, safe="")


def clip(text: str, limit: int, note: str = "\n\n… (shortened)") -> str:
    """At most `limit` characters, with a note when something was cut."""
    return text if len(text) <= limit else text[: limit - len(note)] + note

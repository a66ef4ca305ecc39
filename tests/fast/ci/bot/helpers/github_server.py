"""A local server that speaks GitHub's contract: threaded, in memory, every request and reply checked.

It keeps what the bots need (pull requests, comments, check runs, labels, runs, jobs, artifacts) and answers with
objects that validate against GitHub's description. `problems` collects every violation; tests assert it is empty.
`faults` makes the next matching requests fail before or after they took effect; a listing does not show `hidden`
comments yet. `granted`, when set, is what each token may do; `refused` what it was asked beyond that.
"""

from __future__ import annotations

import http.server
import io
import json
import re
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.fast.ci.bot.helpers import openapi
from tests.fast.ci.bot.helpers.openapi import named_sample, overlay
from tests.fast.ci.bot.helpers.permissions import lacking

REPO = "miles-rl/miles"
APP_ID, BOT_ID = 4242, 41_898_282
TOKEN, APP_TOKEN = "token-of-actions", "token-of-app"


def iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


@dataclass
class Fault:
    """Fail `times` requests that match: `before` or `after` the effect; `status` 0 drops the connection."""

    method: str
    pattern: str
    status: int = 0
    when: str = "before"
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=lambda: {"message": "fault"})


@dataclass
class Seen:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    token: str


class GitHub:
    """State and rules. `start()` returns the base URL."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.next_id = 1000
        self.permissions: dict[str, str] = {}
        self.users: dict[str, int] = {}
        self.pulls: dict[int, dict[str, Any]] = {}
        self.contains: dict[int, tuple[str, ...]] = {}  # commits of a pull request beside its head
        self.comments: dict[int, dict[str, Any]] = {}
        self.checks: dict[int, dict[str, Any]] = {}
        self.labels: dict[int, list[str]] = {}
        self.events: dict[int, list[dict[str, Any]]] = {}
        self.runs: dict[int, dict[str, Any]] = {}
        self.jobs: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self.artifacts: dict[int, list[tuple[int, str, bytes]]] = {}
        self.runners: list[dict[str, Any]] = []
        self.dispatched: list[tuple[str, dict[str, Any]]] = []
        self.seen: list[Seen] = []
        self.problems: list[str] = []
        self.refused: list[str] = []
        self.faults: list[Fault] = []
        self.hidden: set[int] = set()
        self.page_size = 100
        self.dispatch_details = True
        self.lose_dispatch = False
        self.on_dispatch: Callable[[str, int, dict[str, Any]], None] | None = None
        self.granted: dict[str, dict[str, str]] | None = None
        self.base = ""

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> str:
        handler = type("Handler", (_Handler,), {"github": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()
        self.base = f"http://127.0.0.1:{self.server.server_address[1]}"
        return self.base

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    # -- fixtures -------------------------------------------------------------------------------

    def user(self, login: str, permission: str | None = None, *, bot: bool = False) -> dict[str, Any]:
        number = self.users.setdefault(login, len(self.users) + 7)
        if permission is not None:
            self.permissions[login] = permission
        return overlay(named_sample("simple-user"), {"login": login, "id": number, "type": "Bot" if bot else "User"})

    def pull(
        self, number: int, *, author: str, sha: str, fork: bool = False, body: str = "", pushed_at: float = 0.0
    ) -> dict[str, Any]:
        repo = f"{author}/miles" if fork else REPO
        pull = overlay(
            named_sample("pull-request"),
            {
                "number": number, "state": "open", "body": body, "user": self.user(author),
                "head": {"sha": sha, "ref": "topic", "repo": overlay(named_sample("repository"), {"full_name": repo, "pushed_at": iso(pushed_at)})},
                "base": {"ref": "main", "repo": overlay(named_sample("repository"), {"full_name": REPO})},
            },
        )  # fmt: skip
        self.pulls[number] = pull
        self.labels.setdefault(number, [])
        return pull

    def comment(
        self, number: int, body: str, *, login: str, user_id: int | None = None, at: float | None = None
    ) -> dict[str, Any]:
        with self.lock:
            comment_id = self.new_id()
            user = self.user(login)
            if user_id is not None:
                user = {**user, "id": user_id, "type": "Bot"}
            now = iso(at if at is not None else time.time())
            comment = overlay(
                named_sample("issue-comment"),
                {
                    "id": comment_id, "body": body, "user": user, "created_at": now, "updated_at": now,
                    "issue_url": f"{self.base}/repos/{REPO}/issues/{number}",
                    "html_url": f"https://github.com/{REPO}/pull/{number}#issuecomment-{comment_id}",
                },
            )  # fmt: skip
            self.comments[comment_id] = comment
            return comment

    def comments_of(self, number: int) -> list[dict[str, Any]]:
        found = [c for c in self.comments.values() if c["issue_url"].endswith(f"/issues/{number}")]
        return sorted(found, key=lambda comment: comment["id"])

    def run(
        self,
        workflow: str,
        *,
        title: str,
        status: str = "in_progress",
        conclusion: str | None = None,
        head_sha: str = "d" * 40,
        event: str = "workflow_dispatch",
        started: float | None = None,
    ) -> dict[str, Any]:
        with self.lock:
            run_id = self.new_id()
            at = iso(started if started is not None else time.time())
            run = overlay(
                named_sample("workflow-run"),
                {
                    "id": run_id, "name": workflow.removesuffix(".yml"), "display_title": title, "status": status, "conclusion": conclusion,
                    "path": f".github/workflows/{workflow}", "head_sha": head_sha, "run_attempt": 1, "event": event, "created_at": at,
                    "run_started_at": at, "html_url": f"https://github.com/{REPO}/actions/runs/{run_id}",
                    "head_repository": overlay(named_sample("minimal-repository"), {"full_name": REPO}),
                    "repository": overlay(named_sample("minimal-repository"), {"full_name": REPO}),
                },
            )  # fmt: skip
            self.runs[run_id] = run
            return run

    def job(
        self,
        run_id: int,
        name: str,
        conclusion: str | None,
        *,
        status: str = "completed",
        seconds: float = 5.0,
        attempt: int = 1,
        **values: Any,
    ) -> dict[str, Any]:
        job_id = self.new_id()
        start = time.time() - 100
        job = overlay(
            named_sample("job"),
            {
                "id": job_id, "run_id": run_id, "name": name, "status": status, "conclusion": conclusion, "run_attempt": attempt,
                "started_at": iso(start), "completed_at": iso(start + seconds), "created_at": iso(start),
                "html_url": f"https://github.com/{REPO}/actions/runs/{run_id}/job/{job_id}", **values,
            },
        )  # fmt: skip
        self.jobs.setdefault((run_id, attempt), []).append(job)
        return job

    def artifact(self, run_id: int, name: str, files: dict[str, bytes]) -> None:
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, content in files.items():
                archive.writestr(path, content)
        self.artifacts.setdefault(run_id, []).append((self.new_id(), name, data.getvalue()))

    # -- requests -------------------------------------------------------------------------------

    def answer(
        self, method: str, path: str, query: dict[str, str], body: Any, token: str
    ) -> tuple[int, Any, dict[str, str]]:
        short = path.removeprefix(f"/repos/{REPO}")
        for verb, pattern, function in _ROUTES:
            found = re.fullmatch(pattern, short)
            if verb == method and found:
                with self.lock:
                    return function(self, found, query, body, token)
        return 404, {"message": "Not Found"}, {}

    def listing(
        self, items: list[Any], query: dict[str, str], path: str, key: str | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        size = min(int(query.get("per_page", 30)), self.page_size)
        page = int(query.get("page", 1))
        part = items[(page - 1) * size : page * size]
        headers = {}
        if page * size < len(items):
            rest = "&".join(f"{name}={value}" for name, value in query.items() if name != "page")
            headers["link"] = (
                f'<{self.base}{path}?{rest}&page={page + 1}>; rel="next", <{self.base}{path}?page=9>; rel="last"'
            )
        return 200, part if key is None else {"total_count": len(items), key: part}, headers


Answer = tuple[int, Any, dict[str, str]]
_ROUTES: list[tuple[str, str, Callable[..., Answer]]] = []


def route(method: str, pattern: str) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    def add(function: Callable[..., Answer]) -> Callable[..., Answer]:
        _ROUTES.append((method, pattern, function))
        return function

    return add


NOT_FOUND: Answer = (404, {"message": "Not Found"}, {})


@route("GET", r"/collaborators/([^/]+)/permission")
def _permission(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    login = unquote(found[1])
    if login not in hub.permissions:
        return NOT_FOUND
    level = hub.permissions[login]
    # As GitHub does: maintain shows as write, triage as read.
    shown = {"maintain": "write", "triage": "read"}.get(level, level)
    return (
        200,
        overlay(named_sample("repository-collaborator-permission"), {"permission": shown, "role_name": level}),
        {},
    )


@route("GET", r"/pulls/(\d+)")
def _pull(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    pull = hub.pulls.get(int(found[1]))
    if pull is None:
        return NOT_FOUND
    labels = [overlay(named_sample("label"), {"name": name}) for name in hub.labels[int(found[1])]]
    return 200, {**pull, "labels": labels}, {}


@route("GET", r"/commits/([0-9a-f]{40})/pulls")
def _pulls_of(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    simple = named_sample("pull-request-simple")
    items = [
        overlay(simple, {"number": number, "state": pull["state"], "head": {"sha": pull["head"]["sha"]}})
        for number, pull in sorted(hub.pulls.items())
        if pull["head"]["sha"] == found[1] or found[1] in hub.contains.get(number, ())
    ]  # fmt: skip
    return hub.listing(items, query, found.string)


@route("GET", r"/issues/(\d+)/comments")
def _list_comments(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    shown = [comment for comment in hub.comments_of(int(found[1])) if comment["id"] not in hub.hidden]
    return hub.listing(shown, query, f"/repos/{REPO}{found.string}")


@route("GET", r"/issues/comments")
def _all_comments(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    items = sorted(hub.comments.values(), key=lambda comment: comment["updated_at"], reverse=True)
    items = [comment for comment in items if comment["updated_at"] >= query.get("since", "")]
    return hub.listing(items, query, f"/repos/{REPO}{found.string}")


@route("POST", r"/issues/(\d+)/comments")
def _create_comment(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    if len(body["body"]) > 65_536:
        return 422, {"message": "Validation Failed"}, {}
    return 201, hub.comment(int(found[1]), body["body"], login="github-actions[bot]", user_id=BOT_ID), {}


@route("GET", r"/issues/comments/(\d+)")
def _get_comment(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    comment = hub.comments.get(int(found[1]))
    return (200, comment, {}) if comment else NOT_FOUND


@route("PATCH", r"/issues/comments/(\d+)")
def _edit_comment(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    comment = hub.comments.get(int(found[1]))
    if comment is None:
        return NOT_FOUND
    comment |= {"body": body["body"], "updated_at": iso(time.time())}
    return 200, comment, {}


@route("DELETE", r"/issues/comments/(\d+)")
def _delete_comment(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    return (204, None, {}) if hub.comments.pop(int(found[1]), None) else NOT_FOUND


def _label_objects(hub: GitHub, number: int) -> list[Any]:
    return [overlay(named_sample("label"), {"name": name}) for name in hub.labels[number]]


@route("GET", r"/issues/(\d+)/labels")
def _labels(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    return 200, _label_objects(hub, int(found[1])), {}


@route("POST", r"/issues/(\d+)/labels")
def _add_labels(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    number = int(found[1])
    hub.labels[number] += [name for name in body["labels"] if name not in hub.labels[number]]
    return 200, _label_objects(hub, number), {}


@route("DELETE", r"/issues/(\d+)/labels/([^/]+)")
def _remove_label(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    number, name = int(found[1]), unquote(found[2])
    if name not in hub.labels[number]:
        return NOT_FOUND
    hub.labels[number].remove(name)
    return 200, _label_objects(hub, number), {}


@route("GET", r"/issues/(\d+)/events")
def _events(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    return hub.listing(hub.events.get(int(found[1]), []), query, f"/repos/{REPO}{found.string}")


@route("GET", r"/commits/([0-9a-f]{40})/check-runs")
def _check_runs(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    items = [check for check in hub.checks.values() if check["head_sha"] == found[1]]
    if "check_name" in query:
        items = [check for check in items if check["name"] == query["check_name"]]
    if "status" in query:
        items = [check for check in items if check["status"] == query["status"]]
    return hub.listing(items, query, f"/repos/{REPO}{found.string}", "check_runs")


@route("POST", r"/check-runs")
def _create_check(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    app = overlay(named_sample("integration"), {"id": APP_ID if token == APP_TOKEN else 15_368})
    check = overlay(
        named_sample("check-run"), {"id": hub.new_id(), "app": app, "conclusion": None, "external_id": None, **body}
    )
    check["output"] = overlay(named_sample("check-run")["output"], body.get("output", {}))
    hub.checks[check["id"]] = check
    return 201, check, {}


@route("PATCH", r"/check-runs/(\d+)")
def _edit_check(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    check = hub.checks.get(int(found[1]))
    if check is None:
        return NOT_FOUND
    check |= {key: value for key, value in body.items() if key != "output"}
    check["output"] = overlay(check["output"], body.get("output", {}))
    return 200, check, {}


@route("POST", r"/actions/workflows/([^/]+)/dispatches")
def _dispatch(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    workflow, inputs = unquote(found[1]), body.get("inputs", {})
    if len(inputs) > 25 or body["ref"] != "main":
        return 422, {"message": "Validation Failed"}, {}
    hub.dispatched.append((workflow, inputs))
    if hub.lose_dispatch:
        return 204, None, {}
    names = {
        "rerun-test.yml": f"rerun {inputs.get('test_file')} [{inputs.get('request_id')}]",
        "lint-patch.yml": f"lint #{inputs.get('pull_number')} [{inputs.get('request_id')}]",
        "pr-test-rocm.yml": f"ROCm {inputs.get('head_sha')} [{inputs.get('request_id')}]",
    }
    run = hub.run(workflow, title=names[workflow], status="queued")
    if hub.on_dispatch is not None:
        hub.on_dispatch(workflow, run["id"], inputs)
    if not (hub.dispatch_details and body.get("return_run_details")):
        return 204, None, {}
    url = f"{hub.base}/repos/{REPO}/actions/runs/{run['id']}"
    return 200, {"workflow_run_id": run["id"], "run_url": url, "html_url": run["html_url"]}, {}


@route("GET", r"/actions/workflows/([^/]+)/runs")
def _workflow_runs(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    items = [run for run in hub.runs.values() if run["path"].endswith(f"/{unquote(found[1])}")]
    items = [run for run in items if query.get("event") in (None, run["event"])]
    return hub.listing(items[::-1], query, f"/repos/{REPO}{found.string}", "workflow_runs")


@route("GET", r"/actions/runs")
def _runs(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    items = [
        run for run in hub.runs.values()
        if query.get("head_sha") in (None, run["head_sha"]) and query.get("status") in (None, run["status"], run["conclusion"])
    ]  # fmt: skip
    return hub.listing(items[::-1], query, f"/repos/{REPO}{found.string}", "workflow_runs")


@route("GET", r"/actions/runs/(\d+)")
def _get_run(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    run = hub.runs.get(int(found[1]))
    return (200, run, {}) if run else NOT_FOUND


@route("POST", r"/actions/runs/(\d+)/cancel")
def _cancel(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    hub.runs[int(found[1])] |= {"status": "completed", "conclusion": "cancelled"}
    return 202, {}, {}


def _again(hub: GitHub, run_id: int) -> Answer:
    run = hub.runs[run_id]
    run |= {"run_attempt": run["run_attempt"] + 1, "status": "queued", "conclusion": None}
    return 201, {}, {}


@route("POST", r"/actions/runs/(\d+)/rerun-failed-jobs")
def _rerun_failed(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    return _again(hub, int(found[1]))


@route("POST", r"/actions/jobs/(\d+)/rerun")
def _rerun_job(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    run_id = next(key[0] for key, jobs in hub.jobs.items() if any(job["id"] == int(found[1]) for job in jobs))
    return _again(hub, run_id)


@route("GET", r"/actions/runs/(\d+)/attempts/(\d+)/jobs")
def _jobs(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    return hub.listing(hub.jobs.get((int(found[1]), int(found[2])), []), query, f"/repos/{REPO}{found.string}", "jobs")


@route("GET", r"/actions/runs/(\d+)/artifacts")
def _artifacts(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    base = named_sample("artifact")
    items = [
        overlay(base, {"id": i, "name": name, "size_in_bytes": len(data), "expired": False})
        for i, name, data in hub.artifacts.get(int(found[1]), [])
    ]
    return hub.listing(items, query, f"/repos/{REPO}{found.string}", "artifacts")


@route("GET", r"/actions/artifacts/(\d+)/zip")
def _download(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    return 302, None, {"location": f"{hub.base}/storage/{found[1]}"}


@route("GET", r"/actions/runners")
def _runner_list(hub: GitHub, found: Any, query: Any, body: Any, token: str) -> Answer:
    return hub.listing(hub.runners, query, f"/repos/{REPO}{found.string}", "runners")


class _Handler(http.server.BaseHTTPRequestHandler):
    github: GitHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        hub, parts = self.github, urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        size = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if parts.path.startswith("/storage/"):
            return self._storage(int(parts.path.rsplit("/", 1)[-1]), token)
        method = self.command
        hub.seen.append(Seen(method, parts.path, query, body, token))
        hub.problems += openapi.check_request(method, parts.path, query, body)
        if token not in (TOKEN, APP_TOKEN):
            return self._send(401, {"message": "Bad credentials"}, {})
        fault = next(
            (f for f in hub.faults if f.times > 0 and f.method == method and re.search(f.pattern, parts.path)), None
        )
        if fault is not None:
            fault.times -= 1
            if fault.when == "before":
                return self._fail(fault)
        if hub.granted is not None:
            missing = lacking(method, parts.path.removeprefix(f"/repos/{REPO}"), hub.granted[token])
            if missing:
                hub.refused.append(f"{method} {parts.path}: {missing}")
                return self._send(403, {"message": "Resource not accessible by integration"}, {})
        status, reply, headers = hub.answer(method, parts.path, query, body, token)
        hub.problems += openapi.check_reply(method, parts.path, status, reply)
        if fault is not None:
            return self._fail(fault)
        return self._send(status, reply, headers)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _serve

    def _storage(self, artifact: int, token: str) -> None:
        hub = self.github
        if token:
            hub.problems.append("the token was sent to the storage host's path")
        data = next((data for items in hub.artifacts.values() for i, _, data in items if i == artifact), b"")
        if not self.headers.get("range"):
            hub.problems.append("a download without an explicit range")
        self._send(206, data, {"content-range": f"bytes 0-{len(data) - 1}/{len(data)}"})

    def _fail(self, fault: Fault) -> None:
        if fault.status == 0:
            self.close_connection = True
            self.connection.close()
            return
        self._send(fault.status, fault.body, fault.headers)

    def _send(self, status: int, reply: Any, headers: dict[str, str]) -> None:
        data = reply if isinstance(reply, bytes) else b"" if reply is None else json.dumps(reply).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

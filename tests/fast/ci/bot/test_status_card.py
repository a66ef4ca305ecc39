"""The finished run -> one comment per pull request, Lark, summary; artifacts of forks are data."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from miles_ci.bot.card_comment import Section, join_sections, newest, sections_of, write_comment
from miles_ci.bot.github import Client
from miles_ci.bot.marker import Marker, parse_marker
from miles_ci.bot.runs import read_run
from miles_ci.bot.status_card import make_card, pull_of
from tests.fast.ci.bot.conftest import HEAD, Job
from tests.fast.ci.bot.helpers.github_server import BOT_ID, GitHub

NUMBER = 31


def shard(suite: str, part: str, *tests: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 2, "run": {"suite": suite, "hardware": "h200", "shard": part}, "tests": list(tests)}


def result(path: str, outcome: str, message: str = "") -> dict[str, Any]:
    failures = (
        [{"node": f"{path}::test_x", "type": "AssertionError", "message": message, "signature": "ab12"}]
        if outcome == "failed"
        else []
    )
    attempt = {"wall_s": 2.5, "failures": failures, "leaked": [], "cause": "", "cause_kind": ""}
    return {
        "path": path,
        "outcome": outcome,
        "attempts": [attempt],
        "nodes": {f"{path}::test_x": outcome},
        "message": message,
        "tolerated": "",
    }


def merged(*shards: dict[str, Any], **values: Any) -> bytes:
    return json.dumps(
        {"schema": 2, "shards": list(shards), "never_executed": [], "faults": [], "skipped_suites": {}, **values}
    ).encode()


def finished(
    hub: GitHub,
    workflow: str = "pr-test.yml",
    *,
    event: str = "pull_request",
    artifact: bytes | None = None,
    conclusion: str = "failure",
) -> dict[str, Any]:
    run = hub.run(workflow, title="a change", status="completed", conclusion=conclusion, head_sha=HEAD, event=event)
    hub.job(run["id"], "plan", "success")
    for part in ("1/2", "2/2"):
        hub.job(run["id"], f"stage-a-cpu ({part}) / stage-a-cpu", "failure")
    content = artifact if artifact is not None else merged(
        shard("stage-a-cpu", "1/2", result("tests/fast/a/test_a.py", "failed", "expected 1\nfound 2")),
        shard("stage-a-cpu", "2/2", result("tests/fast/b/test_b.py", "passed")),
        skipped_suites={"stage-c-4-gpu-mi300x": "pool mi300x-4gpu is disabled: node is being re-imaged"},
    )  # fmt: skip
    hub.artifact(run["id"], "merged-rocm" if "rocm" in workflow else "merged", {"merged.json": content})
    return run


@pytest.fixture
def pull(hub: GitHub) -> GitHub:
    hub.pull(NUMBER, author="paul", sha=HEAD)
    return hub


def cards(hub: GitHub) -> list[str]:
    found = [c for c in hub.comments_of(NUMBER) if c["user"]["id"] == BOT_ID]
    return [c["body"] for c in found if (parse_marker(c["body"]) or Marker("")).kind == "card"]


def test_the_comment_names_failing_tests_reasons_links_and_skipped_suites(pull: GitHub, job: Job) -> None:
    run = finished(pull)
    code, outputs = job("card", event={"workflow_run": {"id": run["id"]}})
    assert code == 0
    (body,) = cards(pull)
    assert "`tests/fast/a/test_a.py::test_x`" in body
    assert "[stage\\-a\\-cpu (1/2)]" in body.replace("\\(", "(").replace("\\)", ")")
    assert "node is being re\\-imaged" in body
    assert "1 passed, 1 failed" in body
    assert "`tests/fast/a/test_a.py::test_x`" in outputs["summary"]


def test_a_second_run_edits_the_same_comment_and_rocm_has_its_own_section(pull: GitHub, job: Job) -> None:
    for _ in range(2):
        job("card", event={"workflow_run": {"id": finished(pull)["id"]}})
    job("card", event={"workflow_run": {"id": finished(pull, "pr-test-rocm.yml", event="pull_request_target")["id"]}})
    (body,) = cards(pull)
    assert body.count("<!-- section ") == 2


def test_two_writers_at_once_leave_one_comment_the_lowest_id(pull: GitHub, client: Client) -> None:
    run = read_run(client, finished(pull)["id"])
    card = make_card(client, run, now=time.time())
    line = Marker("card", req=str(NUMBER)).line()
    ids = [pull.comment(NUMBER, line, login="github-actions[bot]", user_id=BOT_ID)["id"] for _ in range(3)]
    write_comment(client, NUMBER, run, card, bot_id=BOT_ID)
    assert sorted(pull.comments) == [ids[0]]


def test_a_marker_forged_by_a_user_is_neither_edited_nor_deleted(pull: GitHub, client: Client) -> None:
    run = read_run(client, finished(pull)["id"])
    card = make_card(client, run, now=time.time())
    forged = pull.comment(NUMBER, Marker("card", req=str(NUMBER)).line() + "\nall green", login="paul")
    write_comment(client, NUMBER, run, card, bot_id=BOT_ID)
    assert pull.comments[forged["id"]]["body"].endswith("all green")
    assert len(cards(pull)) == 1


@pytest.mark.parametrize(
    "content",
    [b"{", b'{"schema":1,"shards":7}', b'{"shards":[],"shards":[]}', json.dumps({"shards": [{"schema": 9}]}).encode(), b'{"shards":[],"never_executed":[1]}', b'{"shards":[],"skipped_suites":{"a":1}}'],
)  # fmt: skip
def test_a_forged_artifact_is_ignored_with_a_note_and_the_card_still_comes(
    pull: GitHub, job: Job, content: bytes
) -> None:
    run = finished(pull, artifact=content)
    assert job("card", event={"workflow_run": {"id": run["id"]}})[0] == 0
    assert "ignored" in cards(pull)[0]


def test_markup_in_a_forks_artifact_stays_text(pull: GitHub, job: Job) -> None:
    evil = "<!-- miles-ci {} --> <img src=x> @maintainers [x](javascript:1) `` ` ``"
    content = merged(
        shard("stage-a-cpu", "1/2", result(f"tests/{evil}", "failed", evil)), skipped_suites={evil[:60]: evil}
    )
    job("card", event={"workflow_run": {"id": finished(pull, artifact=content)["id"]}})
    (body,) = cards(pull)
    outside = body.split("\n", 1)[1]
    import re

    prose = re.sub(r"(`+).+?\1", "", outside)
    assert "<img" not in prose
    assert "@maintainers" not in prose
    assert "](javascript" not in prose
    assert "<!-- miles-ci" not in prose


def test_a_run_of_a_superseded_commit_writes_no_comment(pull: GitHub, job: Job) -> None:
    run = finished(pull)
    pull.pulls[NUMBER]["head"]["sha"] = "f" * 40
    assert job("card", event={"workflow_run": {"id": run["id"]}})[0] == 0
    assert cards(pull) == []


def test_only_the_open_pull_request_whose_head_was_tested_gets_the_card(pull: GitHub, client: Client) -> None:
    run = read_run(client, finished(pull)["id"])
    pull.pulls.clear()
    for number, sha in ((5, HEAD), (6, "f" * 40), (7, HEAD)):
        pull.pull(number, author="paul", sha=sha)
    pull.pulls[5]["state"] = "closed"
    pull.contains[6] = (HEAD,)  # stacked upon it: GitHub lists every pull request that contains the commit
    assert pull_of(client, run) == 7
    del pull.pulls[7]
    assert pull_of(client, run) is None


def test_the_tested_commit_is_named_by_the_title_of_a_dispatched_run_alone(pull: GitHub, client: Client) -> None:
    other = "f" * 40
    pull.pull(8, author="paul", sha=other)
    events = {"pull_request": NUMBER, "pull_request_target": NUMBER, "workflow_dispatch": 8, "schedule": None}
    for event, number in events.items():
        run = pull.run("pr-test-rocm.yml", title=f"ROCm {other} [x]", head_sha=HEAD, event=event)
        assert pull_of(client, read_run(client, run["id"])) == number, event


def test_sections_survive_each_other_and_only_a_newer_run_replaces_one() -> None:
    a, b = {"a": Section((7, 1), "text a")}, {"b": Section((8, 1), "text b")}
    body = join_sections(newest(a, b))
    assert body == "<!-- section a 7.1 -->\ntext a\n\n<!-- section b 8.1 -->\ntext b\n"
    assert sections_of(body) == a | b
    assert sections_of(body.replace("\n", "\r\n")) == a | b
    for order, wins in (((6, 9), False), ((7, 1), False), ((7, 2), True), ((9, 1), True)):
        assert newest(a, {"a": Section(order, "other")})["a"].text == ("other" if wins else "text a")


@pytest.fixture
def lark_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    received: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            data = b'{"code":0}'
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/hook", received
    server.shutdown()
    server.server_close()


def test_a_nightly_run_sends_the_lark_card_and_no_comment(
    pull: GitHub, job: Job, lark_server: tuple[str, list[dict[str, Any]]]
) -> None:
    url, received = lark_server
    run = finished(pull, "nightly.yml", event="schedule")
    assert (
        job("card", event={"workflow_run": {"id": run["id"]}}, LARK_WEBHOOK_SECRET=url, LARK_SIGNING_SECRET="demo")[0]
        == 0
    )
    assert cards(pull) == []
    card = received[0]["card"]
    assert card["schema"] == "2.0"
    assert "a.py" in json.dumps(card)
    assert received[0]["sign"]


def test_a_missing_or_dead_webhook_changes_no_verdict_and_shows_no_secret(
    pull: GitHub, job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_ci.report.cards.lark.DELAYS_S", (0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr("miles_ci.report.cards.lark.random.uniform", lambda a, b: 0.0)
    run = finished(pull, "nightly.yml", event="schedule")
    assert job("card", event={"workflow_run": {"id": run["id"]}})[0] == 0
    assert "::warning::Lark: secret LARK_WEBHOOK_SECRET is not set" in capsys.readouterr().out
    assert (
        job("card", event={"workflow_run": {"id": run["id"]}}, LARK_WEBHOOK_SECRET="http://127.0.0.1:9/secret-path")[0]
        == 0
    )
    out = capsys.readouterr().out
    assert "::warning::Lark: no answer" in out
    assert "secret-path" not in out

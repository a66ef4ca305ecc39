"""The client against a real local server: retries, proofs of absence, pagination, limits, what never leaks."""

from __future__ import annotations

import http.server
import threading
from typing import Any

import pytest

from miles_ci.bot.budget import BudgetExhausted
from miles_ci.bot.github import Client, GitHubError, clip
from miles_ci.bot.marker import Marker, ours
from miles_ci.bot.runs import artifact_files
from miles_ci.bot.transport import Reply, Transport
from miles_ci.errors import UsageError
from tests.fast.ci.bot.conftest import Clock
from tests.fast.ci.bot.helpers.github_server import BOT_ID, REPO, TOKEN, Fault, GitHub


def test_get_survives_lost_connections_and_server_errors(hub: GitHub, client: Client, clock: Clock) -> None:
    hub.pull(1, author="a", sha="c" * 40)
    hub.faults += [
        Fault("GET", "/pulls/1", status=0),
        Fault("GET", "/pulls/1", status=502),
        Fault("GET", "/pulls/1", status=503),
    ]
    assert client.get("{repo}/pulls/1")["number"] == 1
    assert [round(wait) for wait in clock.slept] == pytest.approx([1, 2, 4], abs=1)


def test_five_attempts_and_no_more(hub: GitHub, client: Client) -> None:
    hub.faults.append(Fault("GET", "/pulls/1", status=500, times=99))
    with pytest.raises(GitHubError, match="after 5 attempts"):
        client.get("{repo}/pulls/1")
    assert len(hub.seen) == 5


@pytest.mark.parametrize("status", [403, 404, 422])
def test_a_plain_refusal_is_an_answer_and_is_not_repeated(hub: GitHub, client: Client, status: int) -> None:
    hub.faults.append(Fault("GET", "/pulls/1", status=status, times=9, body={"message": "no"}))
    with pytest.raises(GitHubError, match=f"{status} no") as caught:
        client.get("{repo}/pulls/1")
    assert caught.value.status == status
    assert len(hub.seen) == 1


@pytest.mark.parametrize(
    ("headers", "body", "wait"),
    [
        ({"retry-after": "7"}, {"message": "x"}, 7.0),
        ({"x-ratelimit-remaining": "0"}, {"message": "x"}, 60.0),
        ({}, {"message": "You have exceeded a secondary rate limit"}, 60.0),
    ],
)
def test_a_rate_limited_403_waits_as_long_as_github_says(
    hub: GitHub, client: Client, clock: Clock, headers: dict[str, str], body: dict[str, str], wait: float
) -> None:
    hub.pull(1, author="a", sha="c" * 40)
    hub.faults.append(Fault("GET", "/pulls/1", status=403, headers=headers, body=body))
    client.get("{repo}/pulls/1")
    assert clock.slept == [wait]


def test_the_reset_time_is_used_when_there_is_no_retry_after(hub: GitHub, client: Client, clock: Clock) -> None:
    hub.pull(1, author="a", sha="c" * 40)
    reset = str(int(clock.now) + 90)
    hub.faults.append(
        Fault("GET", "/pulls/1", status=429, headers={"x-ratelimit-remaining": "0", "x-ratelimit-reset": reset})
    )
    client.get("{repo}/pulls/1")
    assert clock.slept[0] == pytest.approx(90, abs=1.5)


def test_no_more_than_ten_minutes_are_waited(hub: GitHub, client: Client, clock: Clock) -> None:
    hub.faults.append(Fault("GET", "/pulls/1", status=429, headers={"retry-after": "400"}, times=9))
    with pytest.raises(GitHubError):
        client.get("{repo}/pulls/1")
    assert sum(clock.slept) <= 600


def proof_of(client: Client) -> Any:
    return lambda: next(
        (dict(c) for c, _ in ours(client.pages("{repo}/issues/1/comments"), BOT_ID, "rerun", "q")), None
    )


@pytest.mark.parametrize("status", [0, 502])
def test_a_post_whose_answer_was_lost_is_not_sent_twice(hub: GitHub, client: Client, status: int) -> None:
    hub.faults.append(Fault("POST", "/comments", status=status, when="after"))
    body = {"body": Marker("rerun", req="q").line()}
    created = client.post("{repo}/issues/1/comments", body, proof=proof_of(client))
    assert [comment["id"] for comment in hub.comments_of(1)] == [created["id"]]


def test_a_post_that_left_nothing_behind_is_sent_again(hub: GitHub, client: Client) -> None:
    hub.faults.append(Fault("POST", "/comments", status=0, when="before"))
    client.post("{repo}/issues/1/comments", {"body": Marker("rerun", req="q").line()}, proof=proof_of(client))
    assert len(hub.comments_of(1)) == 1


def test_a_post_without_a_proof_is_never_repeated(hub: GitHub, client: Client) -> None:
    hub.faults.append(Fault("POST", "/comments", status=502, when="after"))
    with pytest.raises(GitHubError):
        client.post("{repo}/issues/1/comments", {"body": "x"})
    assert len(hub.comments_of(1)) == 1


def test_pages_are_followed_on_the_same_host_and_counted(hub: GitHub, client: Client) -> None:
    for n in range(7):
        hub.comment(1, str(n), login="a")
    hub.page_size = 3
    assert [comment["body"] for comment in client.pages("{repo}/issues/1/comments")] == [str(n) for n in range(7)]
    hub.page_size = 1
    for n in range(100):
        hub.comment(1, str(n), login="a")
    with pytest.raises(GitHubError, match="more than 100 pages"):
        list(client.pages("{repo}/issues/1/comments"))


class Scripted(Transport):
    """Replies in order; remembers requests."""

    def __init__(self, replies: list[Reply]) -> None:
        object.__setattr__(self, "replies", replies)
        object.__setattr__(self, "sent", [])

    def send(self, method: str, url: str, headers: Any, body: bytes | None = None, *, limit: int = 0) -> Reply:
        self.sent.append((method, url, dict(headers)))
        return self.replies.pop(0)


def scripted(*replies: Reply) -> tuple[Client, Scripted]:
    transport = Scripted(list(replies))
    return Client(
        "https://api.github.com", REPO, TOKEN, transport=transport, sleep=lambda s: None, clock=lambda: 0.0
    ), transport


def test_pagination_to_another_host_is_refused() -> None:
    client, _ = scripted(Reply(200, {"link": '<https://evil.example/x>; rel="next"'}, b"[]"))
    with pytest.raises(GitHubError, match="another host"):
        list(client.pages("{repo}/issues/1/comments"))


@pytest.mark.parametrize(
    "location",
    [
        "https://evil.example/x",
        "http://x.blob.core.windows.net/x",
        "https://blob.core.windows.net.evil.example/x",
        "https://notgithub.com/",
        "",
    ],
)
def test_a_download_follows_only_allowed_hosts(location: str) -> None:
    client, transport = scripted(Reply(302, {"location": location}, b""))
    with pytest.raises(GitHubError, match="refused to follow"):
        client.download("{repo}/actions/artifacts/1/zip")
    assert len(transport.sent) == 1


def test_the_storage_host_gets_a_range_and_no_token() -> None:
    client, transport = scripted(
        Reply(302, {"location": "https://p.blob.core.windows.net/x?sig=1"}, b""),
        Reply(206, {"content-range": "bytes 0-1/2"}, b"ok"),
    )
    assert client.download("{repo}/actions/artifacts/1/zip", limit=10).body == b"ok"
    headers = transport.sent[1][2]
    assert "authorization" not in headers
    assert headers["range"] == "bytes=0-9"


def test_a_download_longer_than_its_limit_is_marked() -> None:
    client, _ = scripted(
        Reply(302, {"location": "https://p.blob.core.windows.net/x"}, b""),
        Reply(206, {"content-range": "bytes 0-3/9"}, b"abcd"),
    )
    assert client.download("{repo}/actions/artifacts/1/zip", limit=4).truncated


def test_every_request_carries_version_and_token_and_no_message_shows_the_token(hub: GitHub) -> None:
    client, transport = scripted(Reply(500, {}, b""), *[Reply(500, {}, TOKEN.encode())] * 9)
    with pytest.raises(GitHubError) as caught:
        client.get("{repo}/pulls/1")
    assert transport.sent[0][2]["x-github-api-version"] == "2022-11-28"
    assert transport.sent[0][2]["authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in str(caught.value)
    assert TOKEN not in repr(client)


def test_strict_json_refuses_duplicate_keys_and_nan() -> None:
    for body in (b'{"a":1,"a":2}', b'{"a":NaN}', b"{"):
        client, _ = scripted(Reply(200, {}, body))
        with pytest.raises(UsageError):
            client.get("{repo}/pulls/1")


def test_minute_limits_are_waited_for_and_hourly_limits_refused() -> None:
    clock = Clock()
    client = Client("http://127.0.0.1:9", REPO, TOKEN, sleep=clock.sleep, clock=clock)
    for _ in range(81):
        client.budget.spend("POST")
    assert sum(clock.slept) == pytest.approx(60, abs=1)  # the 81st write of a minute
    for _ in range(419):
        client.budget.spend("POST")
    with pytest.raises(BudgetExhausted, match="500"):
        client.budget.spend("POST")


def test_a_body_is_cut_with_a_note() -> None:
    assert clip("x" * 100, 100) == "x" * 100
    cut = clip("x" * 101, 100)
    assert len(cut) == 100
    assert cut.endswith("(shortened)")


@pytest.mark.parametrize("repository", ["miles", "a/b/c", "a/b?x", "../x"])
def test_a_malformed_repository_is_refused(repository: str) -> None:
    with pytest.raises(UsageError, match="owner/name"):
        Client("http://x", repository, TOKEN)


def test_an_artifact_that_is_no_archive_or_too_large_is_an_error(hub: GitHub, client: Client) -> None:
    import re

    run = hub.run("pr-test.yml", title="x")
    hub.artifacts[run["id"]] = [(5, "merged", b"this is no zip")]
    with pytest.raises(GitHubError, match="not a readable archive"):
        list(artifact_files(client, run["id"], re.compile("merged"), "merged.json"))
    hub.artifacts[run["id"]] = []
    hub.artifact(run["id"], "merged", {"merged.json": b"0" * (21 * 1024 * 1024)})  # a zip bomb in small
    with pytest.raises(GitHubError, match="unpacks to more than"):
        list(artifact_files(client, run["id"], re.compile("merged"), "merged.json"))


def test_paths_inside_an_artifact_are_never_used(hub: GitHub, client: Client) -> None:
    import re

    run = hub.run("pr-test.yml", title="x")
    hub.artifact(run["id"], "merged", {"../../etc/merged.json": b"{}", "other.txt": b"x"})
    files = list(artifact_files(client, run["id"], re.compile("merged"), "merged.json"))
    assert [file.data for file in files] == [b"{}"]


def test_a_server_that_never_answers_ends_in_a_timeout() -> None:
    class Silent(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            threading.Event().wait(3)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = Client(
        f"http://127.0.0.1:{server.server_address[1]}", REPO, TOKEN, transport=Transport(0.05), sleep=lambda s: None
    )
    with pytest.raises(GitHubError, match="TimeoutError"):
        client.get("{repo}/pulls/1")
    server.shutdown()
    server.server_close()

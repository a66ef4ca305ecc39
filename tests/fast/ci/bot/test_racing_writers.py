"""Announcement, report, sweeper and older and newer attempts write one comment at once, in every kind of order.

Each writer is a thread whose requests wait for their turn; a seed decides whose is next. The one thing that is
promised is what `one_comment` rests on: nobody's pause ends before whoever looked before the write has written too.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from miles_ci.bot import one_comment
from miles_ci.bot.card_comment import sections_of, write_comment
from miles_ci.bot.github import Client, GitHubError
from miles_ci.bot.marker import Marker, parse_marker
from miles_ci.bot.rerun.announce import announce
from miles_ci.bot.rerun.report import Finding, report
from miles_ci.bot.rerun.request import Request
from miles_ci.bot.rerun.state import Written, may_write, rank, write_state
from miles_ci.bot.rerun.verdict import RerunVerdict
from miles_ci.bot.runs import read_run
from miles_ci.bot.status_card import make_card
from miles_ci.bot.transport import Reply, Transport
from tests.fast.ci.bot.conftest import HEAD, Clock
from tests.fast.ci.bot.helpers.github_server import BOT_ID, REPO, TOKEN, Fault, GitHub

NUMBER, RUN = 12, 77
REQUEST = Request(NUMBER, HEAD, "tests/fast/test_x.py", "", "", "0" * 32, 1, "maria", {})
WRITES = ("POST", "PATCH", "DELETE")


class Turns:
    """Lets one writer at a time take a step, in the order of a seed."""

    def __init__(self, seed: int) -> None:
        self.random, self.condition = random.Random(seed), threading.Condition()
        self.waiting: dict[str, str] = {}
        self.chosen = ""
        self.alive: set[str] = set()
        self.steps = itertools.count()
        self.looked: dict[str, int] = {}  # since when a writer decides by what it has seen
        self.wrote: dict[str, int] = {}

    def step(self, name: str, kind: str) -> None:
        with self.condition:
            self.waiting[name] = kind
            if kind == "sleep":
                self.looked.pop(name, None)
            self.condition.notify_all()
            assert self.condition.wait_for(lambda: self.chosen == name, timeout=60)
            self.chosen = ""
            del self.waiting[name]
            now = next(self.steps)
            if kind in WRITES:
                self.wrote[name] = now
            elif kind != "sleep":
                self.looked.setdefault(name, now)

    def may_go(self, name: str) -> bool:
        if self.waiting[name] != "sleep":
            return True
        return all(since > self.wrote.get(name, -1) for other, since in self.looked.items() if other != name)

    def run(self, writers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """What each writer returned or raised."""
        results: dict[str, Any] = {}

        def act(name: str) -> None:
            try:
                results[name] = writers[name]()
            except Exception as error:  # shown by the caller's assertion
                results[name] = error
            finally:
                with self.condition:
                    self.alive.discard(name)
                    self.looked.pop(name, None)
                    self.condition.notify_all()

        self.alive = set(writers)
        threads = [threading.Thread(target=act, args=(name,), daemon=True) for name in writers]
        for thread in threads:
            thread.start()
        with self.condition:
            while self.alive:
                ready = self.condition.wait_for(lambda: not self.chosen and self.alive <= set(self.waiting), timeout=60)
                assert ready
                if not self.alive:
                    break
                self.chosen = self.random.choice(sorted(name for name in self.waiting if self.may_go(name)))
                self.condition.notify_all()
        for thread in threads:
            thread.join(60)
        return results


@dataclass(frozen=True)
class Taking(Transport):
    turns: Turns = field(default_factory=lambda: Turns(0))
    name: str = ""

    def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, **more: Any) -> Reply:
        self.turns.step(self.name, method)
        return super().send(method, url, headers, body, **more)


def client_of(hub: GitHub, turns: Turns, name: str) -> Client:
    def sleep(seconds: float) -> None:
        turns.step(name, "sleep")

    return Client(hub.base, REPO, TOKEN, transport=Taking(turns=turns, name=name), sleep=sleep)


def body_of(marker: Marker) -> str:
    return f"{marker.line()}\n{marker.attempt} {marker.state}"


def marker_of(attempt: int, state: str) -> Marker:
    return Marker("rerun", REQUEST.request_id, RUN, attempt, state, HEAD)


def ours(hub: GitHub) -> list[Marker]:
    found = [parse_marker(c["body"]) for c in hub.comments_of(NUMBER) if c["user"]["id"] == BOT_ID]
    return [marker for marker in found if marker is not None]


def stands(hub: GitHub, attempt: int, state: str) -> int:
    return int(hub.comment(NUMBER, body_of(marker_of(attempt, state)), login="b", user_id=BOT_ID)["id"])


def write(client: Client, attempt: int, state: str, comment_id: int = 0) -> Written:
    marker = marker_of(attempt, state)
    return write_state(client, REQUEST, marker, body_of(marker), bot_id=BOT_ID, comment_id=comment_id)


def test_a_newer_attempt_follows_an_older_one_and_nothing_follows_an_end() -> None:
    states = ("running", "passed", "failed", "cancelled", "lost")
    for (old, a), (new, b) in itertools.product(itertools.product((1, 2), states), repeat=2):
        allowed = may_write(marker_of(new, b), marker_of(old, a))
        assert allowed is (new > old or (new == old and a == "running"))
    assert rank(marker_of(1, "passed")) > rank(marker_of(1, "lost")) > rank(marker_of(1, "running"))
    assert rank(marker_of(2, "running")) > rank(marker_of(1, "passed"))


@pytest.mark.parametrize(
    ("before", "new", "stays"),
    [
        ((1, "passed"), (1, "lost"), True), ((1, "lost"), (1, "passed"), True), ((1, "failed"), (1, "running"), True),
        ((2, "running"), (1, "failed"), True), ((2, "passed"), (1, "lost"), True), ((1, "passed"), (2, "running"), False),
        ((1, "running"), (1, "lost"), False), ((1, "lost"), (2, "failed"), False),
    ],
)  # fmt: skip
def test_what_stands_is_compared_before_it_is_replaced(
    hub: GitHub, client: Client, before: tuple[int, str], new: tuple[int, str], stays: bool
) -> None:
    stands(hub, *before)
    written = write(client, *new)
    assert ours(hub) == [marker_of(*(before if stays else new))]
    assert written.standing == ours(hub)[0]
    assert [seen.method for seen in hub.seen if seen.method in WRITES] == ([] if stays else ["PATCH"])


WRITERS = {
    "an end and a sweep": [(1, "passed"), (1, "lost")],
    "the start again": [(1, "running"), (1, "failed")],
    "an older attempt": [(1, "lost"), (2, "failed")],
    "two true results": [(1, "passed"), (1, "failed")],
    "four ends": [(1, "failed")] * 4,
    "everybody": [(1, "passed"), (1, "lost"), (2, "running"), (1, "running")],
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("comment", ["stands", "is deleted", "stands twice"])
@pytest.mark.parametrize("who", WRITERS)
def test_in_every_order_one_comment_is_left_and_it_is_the_right_one(
    hub: GitHub, who: str, comment: str, seed: int
) -> None:
    comment_id = stands(hub, 1, "running")
    if comment == "stands twice":
        stands(hub, 1, "running")
    elif comment == "is deleted":
        del hub.comments[comment_id]
    turns = Turns(seed)
    writers = {
        f"{n}: {attempt} {state}": lambda n=n, attempt=attempt, state=state: write(
            client_of(hub, turns, f"{n}: {attempt} {state}"), attempt, state, comment_id
        )
        for n, (attempt, state) in enumerate(WRITERS[who])
    }
    results = turns.run(writers)
    assert all(isinstance(result, Written) for result in results.values()), results
    (left,) = ours(hub)
    newest = max(attempt for attempt, _ in WRITERS[who])
    assert left.attempt == newest
    of_newest = {state for attempt, state in WRITERS[who] if attempt == newest}
    assert left.state in of_newest - ({"running"} if len(of_newest) > 1 else set())
    # Nobody was told of an end that was replaced since, but for a `lost` that raced with the true result.
    for result in results.values():
        assert (
            result.standing == left or result.standing.attempt < newest or result.standing.state in ("running", "lost")
        )
    assert left.state != "lost" or "lost" in {results[name].standing.state for name in results if "lost" not in name}


def test_the_orders_that_are_tried_include_the_overwritten_end(hub: GitHub) -> None:
    """The seeds are worth something: without the second look an end is lost to the sweeper in some of them."""
    lost = 0
    for seed in range(12):
        stands(hub, 1, "running")
        turns = Turns(seed)
        names = ("passed", "lost")
        clients = {name: client_of(hub, turns, name) for name in names}
        turns.run({name: lambda name=name, client=clients[name]: write_once(client, name) for name in names})
        lost += ours(hub)[0].state == "lost"
        hub.comments.clear()
    assert lost > 0


def write_once(client: Client, state: str) -> None:
    """Compare and set as one would without the second look."""
    listed = list(client.pages(f"{{repo}}/issues/{NUMBER}/comments"))
    standing = parse_marker(listed[0]["body"])
    assert standing is not None
    if may_write(marker_of(1, state), standing):
        client.patch(f"{{repo}}/issues/comments/{listed[0]['id']}", {"body": body_of(marker_of(1, state))})


@pytest.mark.parametrize("status", [0, 502])
def test_a_write_that_is_repeated_after_a_wait_looks_first(hub: GitHub, clock: Clock, status: int) -> None:
    comment_id = stands(hub, 1, "running")
    hub.faults.append(Fault("PATCH", "/issues/comments/", status=status))

    def sleep(seconds: float) -> None:
        if not clock.slept:  # the wait before the sweeper's second try, long enough for a whole report
            hub.comments[comment_id]["body"] = body_of(marker_of(1, "passed"))
        clock.sleep(seconds)

    written = write(Client(hub.base, REPO, TOKEN, sleep=sleep, clock=clock), 1, "lost")
    assert written.standing == marker_of(1, "passed")
    assert ours(hub) == [marker_of(1, "passed")]
    assert sum(seen.method == "PATCH" for seen in hub.seen) == 1


def test_a_write_whose_answer_was_lost_is_made_once(hub: GitHub, client: Client) -> None:
    stands(hub, 1, "running")
    hub.faults.append(Fault("PATCH", "/issues/comments/", status=0, when="after"))
    assert write(client, 1, "passed").standing == marker_of(1, "passed")
    assert sum(seen.method == "PATCH" for seen in hub.seen) == 1


def test_a_comment_that_a_listing_does_not_show_yet_is_used_and_not_made_again(hub: GitHub, client: Client) -> None:
    comment_id = stands(hub, 1, "running")
    hub.hidden = {comment_id}
    written = write(client, 1, "passed", comment_id)
    assert written.comment_id == comment_id
    assert ours(hub) == [marker_of(1, "passed")]


def test_writers_that_never_rest_are_an_error_and_not_an_endless_loop(hub: GitHub, clock: Clock) -> None:
    comment_id = stands(hub, 1, "running")

    def sleep(seconds: float) -> None:
        hub.comments[comment_id]["body"] = body_of(marker_of(1, "running"))
        clock.sleep(seconds)

    with pytest.raises(GitHubError, match="does not come to rest"):
        write(Client(hub.base, REPO, TOKEN, sleep=sleep, clock=clock), 1, "passed")
    assert clock.slept == [one_comment.SETTLE_S] * one_comment.ROUNDS


def finish(client: Client, attempt: int, state: str, check_id: int) -> str:
    finding = Finding(RerunVerdict(state), ())
    return report(
        client, REQUEST, finding, run_id=RUN, attempt=attempt, run_url="https://x", comment_id=0, check_id=check_id, bot_id=BOT_ID,
        state="lost" if state == "lost" else None,
    )  # fmt: skip


def test_the_check_run_follows_the_state_that_stands(hub: GitHub, client: Client) -> None:
    hub.pull(NUMBER, author="paul", sha=HEAD)
    begun = announce(client, REQUEST, run_id=RUN, attempt=1, run_url="https://x", bot_id=BOT_ID)
    finish(client, 1, "passed", begun.check_id)
    assert hub.checks[begun.check_id]["conclusion"] == "success"
    assert finish(client, 1, "lost", begun.check_id).startswith("unchanged: its state is final")
    assert hub.checks[begun.check_id]["conclusion"] == "success"
    again = announce(client, REQUEST, run_id=RUN, attempt=1, run_url="https://x", bot_id=BOT_ID)
    assert again == begun
    assert ours(hub)[0].state == "passed"
    announce(client, REQUEST, run_id=RUN, attempt=2, run_url="https://x", bot_id=BOT_ID)
    before = dict(hub.checks[begun.check_id])
    assert finish(client, 1, "lost", begun.check_id).startswith("silent")
    assert hub.checks[begun.check_id] == before
    finish(client, 2, "failed", begun.check_id)
    assert finish(client, 1, "passed", begun.check_id).startswith("silent")
    assert hub.checks[begun.check_id]["conclusion"] == "failure"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("comment", ["stands", "is missing"])
def test_cards_of_two_workflows_and_of_an_older_run_end_in_one_comment_with_the_newest_of_each(
    hub: GitHub, client: Client, comment: str, seed: int
) -> None:
    hub.pull(NUMBER, author="paul", sha=HEAD)
    files = ("pr-test.yml", "pr-test.yml", "pr-test-rocm.yml", "pr-test-rocm.yml")
    made = [hub.run(file, title="x", status="completed", conclusion="success", head_sha=HEAD) for file in files]
    runs = [read_run(client, run["id"]) for run in made]
    cards = [make_card(client, run, now=time.time()) for run in runs]
    if comment == "stands":
        write_comment(client, NUMBER, runs[0], cards[0], bot_id=BOT_ID)
    turns = Turns(seed)
    results = turns.run({
        str(run.id): lambda run=run, card=card: write_comment(client_of(hub, turns, str(run.id)), NUMBER, run, card, bot_id=BOT_ID)
        for run, card in zip(runs, cards, strict=True)
    })  # fmt: skip
    assert all(isinstance(result, str) for result in results.values()), results
    (body,) = [c["body"] for c in hub.comments_of(NUMBER)]
    assert {name: section.order for name, section in sections_of(body).items()} == {
        "pr-test.yml": (runs[1].id, 1), "pr-test-rocm.yml": (runs[3].id, 1)
    }  # fmt: skip

"""One comment of ours that several jobs write: a rerun's state, the card of a pull request.

The API has no compare-and-set. So each writer looks, decides by what stands, writes, and looks again: what a slower
writer put in place meanwhile is decided about anew, and of several comments the lowest id stays. A writer leaves when
one comment stands and says what it decided. It rests on one assumption: whoever looked before our write has written
within `SETTLE_S`; a write that has to be repeated is preceded by a look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from miles_ci.bot.github import Client, GitHubError
from miles_ci.bot.marker import Marker, ours

SETTLE_S = 2.0
ROUNDS = 6
_GONE = (404, 410)


@dataclass(frozen=True)
class Standing:
    """A comment of ours as it stands now."""

    id: int
    marker: Marker
    body: str


@dataclass(frozen=True)
class Settled:
    """`done` is for the log: what this writer did, `unchanged` when nothing."""

    comment_id: int
    body: str
    done: str


class _Moved(Exception):
    """What we compared with has changed before our write arrived."""


def settle(
    client: Client,
    number: int,
    choose: Callable[[Sequence[Standing]], str],
    *,
    bot_id: int,
    kind: str,
    req: str,
    comment_id: int = 0,
) -> Settled:
    """Bring the one comment of a pull request or issue with this kind and request to what `choose` says.

    `choose` gets what stands, lowest id first (nothing when there is none), on every look, and returns the whole
    body; it must come to the same answer when it sees its own. `comment_id`: where the comment was last, in case a
    listing does not show it yet. Raises `GitHubError` when other writers do not come to rest.
    """
    done = "unchanged"
    for _ in range(ROUNDS):
        found = _look(client, number, bot_id, kind, req, comment_id)
        wanted = choose(found)
        if len(found) == 1 and _same(found[0].body, wanted):
            return Settled(found[0].id, wanted, done)
        if not found:

            def proof() -> Mapping[str, int] | None:
                return next(({"id": item.id} for item in _look(client, number, bot_id, kind, req)), None)

            created = client.post(f"{{repo}}/issues/{number}/comments", {"body": wanted}, proof=proof)
            done = f"created comment {created['id']}"
        else:
            if not _same(found[0].body, wanted) and _edit(client, found[0], wanted):
                done = f"edited comment {found[0].id}"
            for other in found[1:]:
                _delete(client, other)
        client.sleep(SETTLE_S)
    raise GitHubError(f"#{number}: the {kind} comment {req} does not come to rest")


def _edit(client: Client, standing: Standing, body: str) -> bool:
    """Whether the edit was made; not when the comment changed or went before a repetition of a failed one."""
    path = f"{{repo}}/issues/comments/{standing.id}"

    def unmoved() -> None:
        if client.get(path).get("body") != standing.body:
            raise _Moved

    try:
        client.patch(path, {"body": body}, before_repeat=unmoved)
    except _Moved:
        return False
    except GitHubError as error:
        if error.status not in _GONE:
            raise
        return False
    return True


def _delete(client: Client, standing: Standing) -> None:
    try:
        client.delete(f"{{repo}}/issues/comments/{standing.id}")
    except GitHubError as error:
        if error.status not in _GONE:  # another writer was faster
            raise


def _same(one: str, other: str) -> bool:
    """Whether two bodies say the same; line ends and trailing space may not survive the API."""
    return one.replace("\r\n", "\n").rstrip() == other.replace("\r\n", "\n").rstrip()


def _look(client: Client, number: int, bot_id: int, kind: str, req: str, comment_id: int = 0) -> list[Standing]:
    """Our comments over all pages, lowest id first."""
    listed = list(client.pages(f"{{repo}}/issues/{number}/comments"))
    if comment_id > 0 and all(comment["id"] != comment_id for comment in listed):
        try:
            listed.append(client.get(f"{{repo}}/issues/comments/{comment_id}"))
        except GitHubError as error:
            if error.status not in _GONE:
                raise
    return [
        Standing(comment["id"], marker, str(comment.get("body") or ""))
        for comment, marker in ours(listed, bot_id, kind, req)
    ]

"""Commands in comments: the grammar, the only parser, and who may use what.

A command starts at column 0 in prose, one a line, at most five a comment. Arguments are checked here against
closed patterns and again where they are used.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from miles_ci.bot.prose import prose_lines
from miles_ci.errors import edit_distance

MAX_COMMANDS = 5
MAX_PATH = 250
PATH = re.compile(r"tests/(fast|fast-gpu|e2e|rocm)(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*/test_[A-Za-z0-9_][A-Za-z0-9_.-]*\.py")
NODE = re.compile(r"[A-Za-z0-9_\[\].:-]{1,200}")
SUITE = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
SHA = re.compile(r"[0-9a-f]{40}")
SHA_PREFIX = re.compile(r"[0-9a-f]{12,40}")
REQUEST_ID = re.compile(r"[0-9a-f]{32}")

# command -> (usage, who): write = write access; approved = also the author while the head SHA is approved.
COMMANDS: dict[str, tuple[str, str]] = {
    "/rerun-test": ("/rerun-test FILE[::NODE] [suite=ID]", "approved"),
    "/rerun-failed": ("/rerun-failed [SUITE]", "approved"),
    "/test": ("/test ?", "anyone"),
    "/help": ("/help", "anyone"),
    "/ok-to-test": ("/ok-to-test SHA", "reviewer"),
    "/not-ok-to-test": ("/not-ok-to-test", "reviewer"),
    "/run-ci": ("/run-ci-LABEL", "write"),
    "/bypass-fastfail": ("/bypass-fastfail", "write"),
    "/clear-labels": ("/clear-labels", "write"),
    "/cancel": ("/cancel", "write"),
    "/lint": ("/lint", "write"),
}


@dataclass(frozen=True)
class Command:
    """A well-formed command. `name` is a key of COMMANDS; `label` only for /run-ci-LABEL."""

    name: str
    line: int
    file: str = ""
    node: str = ""
    suite: str = ""
    sha: str = ""
    label: str = ""

    @property
    def who(self) -> str:
        return COMMANDS[self.name][1]


@dataclass(frozen=True)
class Problem:
    """A line that was meant for us and cannot be followed; the text goes into the reply."""

    line: int
    message: str


def parse_commands(body: str | None, *, labels: Collection[str] = ()) -> list[Command | Problem]:
    """Commands of one comment in order. An unrelated `/word` is ignored; one close to ours is a `Problem`."""
    out: list[Command | Problem] = []
    for line in prose_lines(body):
        if not line.text.startswith("/"):
            continue
        words = line.text.split()
        parsed = _parse(words, line.number, labels)
        if parsed is not None:
            out.append(parsed)
    if len(out) > MAX_COMMANDS:
        return [Problem(0, f"{len(out)} commands in one comment; at most {MAX_COMMANDS} are taken, so none was run")]
    return out


def _parse(words: list[str], line: int, labels: Collection[str]) -> Command | Problem | None:
    word, rest = words[0], words[1:]
    if word.startswith("/run-ci-"):
        return _run_ci(word, rest, line, labels)
    if word not in COMMANDS or word == "/run-ci":
        near = min(COMMANDS, key=lambda name: (edit_distance(word, name, 2), name))
        if edit_distance(word, near, 2) > 2:
            return None
        return Problem(line, f"`{_shown(word)}` is not a command; did you mean `{COMMANDS[near][0]}`?")
    usage = f"usage: `{COMMANDS[word][0]}`"
    if word == "/rerun-test":
        return _rerun_test(rest, line, usage)
    if word == "/rerun-failed":
        if len(rest) > 1 or (rest and not SUITE.fullmatch(rest[0])):
            return Problem(line, usage)
        return Command(word, line, suite=rest[0] if rest else "")
    if word == "/ok-to-test":
        if len(rest) != 1 or not SHA_PREFIX.fullmatch(rest[0]):
            return Problem(line, f"{usage} (at least 12 hex digits of the head commit you reviewed)")
        return Command(word, line, sha=rest[0])
    if word == "/test":
        return Command(word, line) if rest == ["?"] else Problem(line, usage)
    return Command(word, line) if not rest else Problem(line, f"{usage}, without arguments")


def _rerun_test(rest: list[str], line: int, usage: str) -> Command | Problem:
    if not 1 <= len(rest) <= 2:
        return Problem(line, usage)
    file, _, node = rest[0].partition("::")
    suite = ""
    if len(rest) == 2:
        if not rest[1].startswith("suite="):
            return Problem(line, usage)
        suite = rest[1].removeprefix("suite=")
        if not SUITE.fullmatch(suite):
            return Problem(line, "suite= takes a suite id: lower-case letters, digits and '-'")
    problem = check_target(file, node if "::" in rest[0] else None)
    return Problem(line, problem) if problem else Command("/rerun-test", line, file=file, node=node, suite=suite)


def check_target(file: str, node: str | None) -> str | None:
    """What is wrong with a test path and node, or None. Used by the gateway and again by the run."""
    if len(file) > MAX_PATH or not PATH.fullmatch(file):
        return (
            f"the file must match `tests/(fast|fast-gpu|e2e|rocm)/…/test_*.py` and have at most {MAX_PATH} characters"
        )
    if node is not None and not NODE.fullmatch(node):
        return "the node may hold letters, digits and `_ [ ] . : -`, at most 200"
    return None


def _run_ci(word: str, rest: list[str], line: int, labels: Collection[str]) -> Command | Problem:
    label = word.removeprefix("/")
    if rest:
        return Problem(line, "usage: `/run-ci-LABEL`, without arguments")
    if label not in labels:
        near = min(labels, key=lambda name: (edit_distance(label, name, 3), name), default="")
        hint = f"; did you mean `/{near}`?" if near and edit_distance(label, near, 3) <= 3 else ""
        return Problem(line, f"`{_shown(word)}` names no label of registry.yaml{hint}")
    return Command("/run-ci", line, label=label)


def _shown(word: str) -> str:
    """A word of a stranger, safe inside a code span."""
    return re.sub(r"[^A-Za-z0-9/_.-]", "?", word)[:40]

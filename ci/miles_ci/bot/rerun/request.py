"""The inputs of a rerun, checked again where they are used: the dispatch API can be called by other hands too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from miles_ci.bot.actions_io import variable
from miles_ci.bot.grammar import REQUEST_ID, SHA, SUITE, check_target
from miles_ci.errors import UsageError
from miles_ci.report.strict_json import loads

_LOGIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38})(?:\[bot\])?")


@dataclass(frozen=True)
class Request:
    """One rerun. `directives`: dependency -> commit, or image tag, as approved; empty for the image's own."""

    pull_number: int
    head_sha: str
    test_file: str
    node: str
    suite: str
    request_id: str
    command_comment_id: int
    requester: str
    directives: Mapping[str, str]

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Request:
        """Raises `UsageError` naming the first input that does not fit."""

        def get(name: str, required: bool = True) -> str:
            return variable(name, environ, required=required)

        number, comment = get("PULL_NUMBER"), get("COMMAND_COMMENT_ID")
        for name, value in (("PULL_NUMBER", number), ("COMMAND_COMMENT_ID", comment)):
            if not re.fullmatch(r"[1-9]\d{0,15}", value):
                raise UsageError(f"{name}: expected a positive number")
        file, node, suite = get("TEST_FILE"), get("TEST_NODE", False), get("SUITE", False)
        problem = check_target(file, node or None)
        if problem:
            raise UsageError(f"TEST_FILE, TEST_NODE: {problem}")
        for name, value, pattern in (
            ("HEAD_SHA", get("HEAD_SHA"), SHA), ("REQUEST_ID", get("REQUEST_ID"), REQUEST_ID), ("REQUESTER", get("REQUESTER"), _LOGIN),
        ):  # fmt: skip
            if not pattern.fullmatch(value):
                raise UsageError(f"{name}: malformed")
        if suite and not SUITE.fullmatch(suite):
            raise UsageError("SUITE: not a suite id")
        directives = loads(get("DIRECTIVES", False) or "{}", what="DIRECTIVES")
        if not isinstance(directives, dict) or not all(isinstance(value, str) for value in directives.values()):
            raise UsageError("DIRECTIVES: expected an object of texts")
        return cls(
            int(number),
            get("HEAD_SHA"),
            file,
            node,
            suite,
            get("REQUEST_ID"),
            int(comment),
            get("REQUESTER"),
            directives,
        )

    @property
    def target(self) -> str:
        return f"{self.test_file}::{self.node}" if self.node else self.test_file

    @property
    def check_name(self) -> str:
        return f"rerun / {self.test_file} ({self.suite or 'all suites'})"

    def inputs(self) -> dict[str, str]:
        """As dispatch inputs."""
        import json

        return {
            "command_comment_id": str(self.command_comment_id),
            "directives": json.dumps(dict(self.directives), sort_keys=True),
            "head_sha": self.head_sha,
            "node": self.node,
            "pull_number": str(self.pull_number),
            "request_id": self.request_id,
            "requester": self.requester,
            "suite": self.suite,
            "test_file": self.test_file,
        }

"""The vendored extract is GitHub's own description, and every endpoint the client uses is in it."""

from __future__ import annotations

import pytest

from miles_ci.workflows import node_tools
from tests.fast.ci.bot.helpers import openapi


@pytest.mark.skipif(node_tools.missing() is not None, reason=node_tools.missing() or "")
def test_the_vendored_description_is_githubs_own() -> None:
    wanted = [line for line in openapi.ENDPOINTS if line]
    assert openapi.description() == node_tools.run_node("openapi.mjs", wanted)


def test_a_request_outside_the_contract_is_noticed() -> None:
    path = "/repos/a/b/check-runs"
    assert openapi.check_request("POST", path, {}, {"name": "x"}) != []  # head_sha is required
    assert openapi.check_request("POST", path, {}, {"name": "x", "head_sha": "y", "conclusion": "great"}) != []
    assert openapi.check_request("GET", "/repos/a/b/actions/runs", {"sha": "x"}, None) != []
    assert openapi.check_request("GET", "/repos/a/b/nothing", {}, None) != []
    inputs = {str(n): "x" for n in range(26)}
    dispatch = "/repos/a/b/actions/workflows/x.yml/dispatches"
    assert openapi.check_request("POST", dispatch, {}, {"ref": "main", "inputs": inputs}) != []
    assert openapi.check_request("POST", dispatch, {}, {"ref": "main", "return_run_details": True}) == []


def test_a_reply_outside_the_contract_is_noticed() -> None:
    good = openapi.named_sample("issue-comment")
    path = "/repos/a/b/issues/comments/1"
    assert openapi.check_reply("GET", path, 200, good) == []
    assert openapi.check_reply("GET", path, 200, {**good, "id": "seven"}) != []
    assert openapi.check_reply("DELETE", path, 200, good) != []

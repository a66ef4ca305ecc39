"""Replies of SGLang builds, recorded, in the form of the contract."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from miles.rollout.engines.sglang.wire import check_request, in_our_form
from miles.rollout.errors import EngineCapabilityError, EngineReplyError
from miles.rollout.messages import GenerateRequest, SamplingParams, read_replies

# Replies of a server with room for one request: one that finished, one aborted in the queue, one that ran on through a
# change of the version (kept at 40 tokens).
RECORDED = json.loads((Path(__file__).parent / "recorded/sglang_0_5_23.json").read_text())
PROMPT = np.array([3, 5, 7, 9])


def read(reply, *, rid, most):
    requests = [GenerateRequest(PROMPT, SamplingParams(max_new_tokens=most, ignore_eos=True), seed=0, rid=rid)]
    return read_replies(in_our_form([reply], requests), requests, vocab_size=16, engine="http://e")[0]


def of_0_5_17(name):
    """The same reply as 0.5.17 gives it: by its source it lacks the runs of versions."""
    reply = copy.deepcopy(RECORDED[name])
    del reply["meta_info"]["weight_versions"]
    return reply


@pytest.mark.parametrize("reply", [RECORDED["finished"], of_0_5_17("finished")], ids=["0.5.23", "0.5.17"])
def test_a_finished_request_is_read(reply):
    result = read(reply, rid="finished", most=2)
    assert (result.finish_reason, result.prompt_tokens, len(result.tokens)) == ("length", 4, 2)
    assert result.version_spans.tolist() == [[0, 2]]


@pytest.mark.parametrize(
    "reply", [RECORDED["aborted_in_queue"], of_0_5_17("aborted_in_queue")], ids=["0.5.23", "0.5.17"]
)
def test_a_request_aborted_in_the_queue_has_its_prompt_and_nothing_else(reply):
    assert "prompt_tokens" not in reply["meta_info"]
    result = read(reply, rid="queued", most=3)
    assert (result.finish_reason, result.prompt_tokens, len(result.tokens)) == ("abort", 4, 0)
    assert result.version_spans.tolist() == []


def test_versions_that_changed_on_the_way_are_runs_of_tokens():
    reply = RECORDED["two_versions"]
    (first, second) = reply["meta_info"]["weight_versions"]
    result = read(reply, rid="two", most=40)
    assert result.weight_version == 1
    assert result.version_spans.tolist() == [[0, first["end"]], [1, 40 - second["start"]]]


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "0", "start": 1, "end": 2}],
        [{"version": "0", "start": 0, "end": 1}],
        [{"version": "0", "start": 0}],
        [3],
        "x",
        7,
    ],
)
def test_runs_that_do_not_fit_the_tokens_are_refused_by_name(spans):
    reply = copy.deepcopy(RECORDED["finished"])
    reply["meta_info"]["weight_versions"] = spans
    with pytest.raises(EngineReplyError, match="weight_version_spans"):
        read(reply, rid="finished", most=2)


@pytest.mark.parametrize("reply", [7, {}, {"meta_info": 3}])
def test_what_is_no_reply_is_left_to_the_checks(reply):
    with pytest.raises(EngineReplyError):
        read(reply, rid="r", most=2)


def test_a_finished_reply_without_its_prompt_count_is_not_mended():
    reply = copy.deepcopy(RECORDED["finished"])
    del reply["meta_info"]["prompt_tokens"]
    with pytest.raises(EngineReplyError, match="prompt_tokens is None"):
        read(reply, rid="finished", most=2)


def test_stop_tokens_that_the_server_would_ignore_are_refused():
    def request(**options):
        return GenerateRequest(PROMPT, SamplingParams(max_new_tokens=2, **options), seed=0, rid="r")

    with pytest.raises(EngineCapabilityError, match="stop_token_ids"):
        check_request([request(), request(ignore_eos=True, stop_token_ids=(3,))], "http://e")
    check_request([request(ignore_eos=True), request(stop_token_ids=(3,))], "http://e")

"""Replies of SGLang builds in the form of the engine contract.

| build | what differs |
|---|---|
| 0.5.23 | an aborted request that never ran has no `prompt_tokens` and no `output_token_logprobs`; versions come as `weight_versions: [{version, start, end}]` |
| 0.5.17 | the same, without `weight_versions` |
The checks on a reply are `miles.rollout.messages`', and see the result: what cannot be translated stays as it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles.rollout.errors import EngineCapabilityError
from miles.rollout.messages import GenerateRequest


def check_request(requests: Sequence[GenerateRequest], engine: str) -> None:
    """`EngineCapabilityError` for what an SGLang server would silently ignore."""
    for request in requests:
        if request.sampling.ignore_eos and request.sampling.stop_token_ids:
            raise EngineCapabilityError(
                f"engine {engine} (sglang) stops at no stop_token_ids when ignore_eos is set; leave one of the two out"
            )


def in_our_form(replies: Any, requests: Sequence[GenerateRequest]) -> Any:
    """A list reply of `/generate` with `meta_info` as the contract names it; `requests` in the same order."""
    if not isinstance(replies, list) or len(replies) != len(requests):
        return replies
    return [_one(reply, request) for reply, request in zip(replies, requests, strict=True)]


def _one(reply: Any, request: GenerateRequest) -> Any:
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(meta, dict):
        return reply
    finish = meta.get("finish_reason")
    added: dict[str, Any] = {}
    if isinstance(finish, dict) and finish.get("type") == "abort":
        # Aborted in the queue: nobody counted its prompt, and nothing was drawn.
        added["prompt_tokens"] = meta.get("prompt_tokens", len(request.input_ids))
        added["completion_tokens"] = meta.get("completion_tokens", 0)
        if not added["completion_tokens"]:
            added["output_token_logprobs"] = meta.get("output_token_logprobs") or []
    spans = meta.get("weight_versions")
    if spans is not None:
        added["weight_version_spans"] = _runs(spans)
    return {**reply, "meta_info": {**meta, **added}}


def _runs(spans: Any) -> Any:
    """[[version, tokens], ...] of gapless spans; what is none is handed on, to be refused by name."""
    try:
        runs, end = [], 0
        for span in spans:
            if span["start"] != end:
                return spans
            if span["end"] > end:
                runs.append([span["version"], span["end"] - end])
            end = max(end, span["end"])
        return runs
    except (KeyError, TypeError):
        return spans

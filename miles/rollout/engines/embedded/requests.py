"""Requests of the embedded engine: records for the scheduler, what they produced, and the replies of `/generate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np


@dataclass(slots=True)
class Refusal:
    """Why a request got no result: HTTP status, stable kind, text."""

    status: int
    kind: str
    message: str


@dataclass(slots=True)
class Output:
    """What one request produced. `spans`: (weight version, tokens it drew), in order.

    `kv_spans`: (weight version, positions whose keys and values it computed), in order; empty when one version
    computed all of them.
    """

    tokens: list[int]
    log_probs: list[float]
    finish: dict[str, Any]
    cached_tokens: int
    spans: list[tuple[int, int]]
    support: list[tuple[np.ndarray, np.ndarray]] | None = None
    kv_spans: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Job:
    """The requests of one HTTP call. `done` is called once, on the scheduler's thread."""

    requests: list[EngineRequest]
    done: Callable[[Job], object]
    results: list[Output | Refusal | None] = field(default_factory=list)
    missing: int = 0

    def __post_init__(self) -> None:
        self.missing = len(self.requests)
        self.results = [None] * self.missing
        for index, request in enumerate(self.requests):
            request.job, request.index = self, index

    def answers(self) -> list[Output | Refusal]:
        """All results, in the order of the requests; once none is missing."""
        found = [result for result in self.results if result is not None]
        assert len(found) == len(self.requests)
        return found

    def settle(self, index: int, result: Output | Refusal) -> None:
        if self.results[index] is None:
            self.results[index] = result
            self.missing -= 1
            if self.missing == 0:
                self.done(self)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked `sampling_params` without the seed; one object for all requests that sent the same."""

    max_new: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence to generate. `carried_*` hold what was produced before a retraction.

    It is not started before the engine serves weight version `min_version`.
    """

    rid: str
    input_ids: np.ndarray  # int64 [P]
    sampling: Sampling
    seed: int
    want_support: bool
    min_version: int = 0
    job: Job | None = None
    index: int = 0
    cached_tokens: int = 0
    carried_tokens: list[int] = field(default_factory=list)
    carried_log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    kv_spans: list[tuple[int, int]] = field(default_factory=list)
    support: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def close_span(self, version: int) -> None:
        """What was carried since the last span was drawn by `version`."""
        rest = len(self.carried_tokens) - sum(count for _, count in self.spans)
        if rest:
            self.spans.append((version, rest))

    def close_kv_span(self, version: int, cached: int) -> None:
        """Of the `cached` positions, those since the last span were computed by `version`."""
        rest = cached - sum(count for _, count in self.kv_spans)
        if rest:
            self.kv_spans.append((version, rest))

    def output(self, finish: dict[str, Any], version: int) -> Output:
        """The result so far; `version` computes now."""
        self.close_span(version)
        if self.kv_spans:
            self.close_kv_span(version, len(self.input_ids) + len(self.carried_tokens) - 1)
        return Output(
            tokens=self.carried_tokens,
            log_probs=self.carried_log_probs,
            finish=finish,
            cached_tokens=self.cached_tokens,
            spans=self.spans or [(version, 0)],
            support=self.support if self.want_support else None,
            kv_spans=self.kv_spans if len(self.kv_spans) > 1 else [],
        )

    def settle(self, result: Output | Refusal) -> None:
        assert self.job is not None
        self.job.settle(self.index, result)


@dataclass(frozen=True, slots=True)
class Limits:
    vocab_size: int
    context_length: int
    max_total_tokens: int
    eos_ids: tuple[int, ...]

    @property
    def most_tokens(self) -> int:
        """Prompt and response of one request together."""
        return min(self.context_length, self.max_total_tokens)

    @property
    def most_ids(self) -> int:
        """Entries of `input_ids`: one prompt of ids, or a list of prompts."""
        return max(self.most_tokens, 1 << 13)


def reply_for(request: EngineRequest, output: Output) -> dict[str, Any]:
    """SGLang's reply object. `text` is empty: this engine knows token ids only."""
    spans = output.spans
    meta: dict[str, Any] = {
        "id": request.rid,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": len(output.tokens),
        "cached_tokens": output.cached_tokens,
        "weight_version": str(spans[-1][0]),
        "finish_reason": output.finish,
        "output_token_logprobs": [(p, t, None) for p, t in zip(output.log_probs, output.tokens, strict=True)],
    }
    if len(spans) > 1:
        meta["weight_version_spans"] = [[str(version), count] for version, count in spans]
    if output.kv_spans:
        meta["kv_weight_version_spans"] = [[str(version), count] for version, count in output.kv_spans]
    if output.support is not None:
        meta["output_sampling_mask"] = _mask_wire(output.support)
    return {"text": "", "output_ids": output.tokens, "meta_info": meta}


def _mask_wire(support: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """CSR: `ids` and renormalised `log_probs` flat, `offsets` with one more entry than tokens."""
    if not support:
        return {"ids": [], "logprobs": [], "offsets": [0]}
    return {
        "ids": np.concatenate([ids for ids, _ in support]).tolist(),
        "logprobs": np.concatenate([values for _, values in support]).tolist(),
        "offsets": [0, *accumulate(len(ids) for ids, _ in support)],
    }

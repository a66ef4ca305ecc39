"""What is asked of an engine and what it answers: records, the wire forms, and the checks on every reply.

`log_probs` of a result are those of the drawn tokens over the full vocabulary at the request's temperature. Where a
sampling mask was asked for, `support_log_probs` are those of the distribution that was really sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NoReturn

import numpy as np

from miles.data.sampling_mask import RolloutSamplingMask
from miles.rollout.errors import EngineReplyError

FINISH_REASONS = frozenset({"stop", "length", "abort"})
LOG_PROB_SLACK = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How to draw. `top_k` -1: no limit. Share one object among requests: its wire form is made once."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @cached_property
    def wire(self) -> dict[str, Any]:
        """Defaults of the engine contract are left out."""
        wire: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        for name, default in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0), ("ignore_eos", False)):
            if getattr(self, name) != default:
                wire[name] = getattr(self, name)
        if self.stop_token_ids:
            wire["stop_token_ids"] = list(self.stop_token_ids)
        return wire


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence. `input_ids` int64 [P]; requests of equal `batch_key` may share one HTTP call.

    With `min_weight_version` above 0 the engine holds the request until it serves that version.
    """

    input_ids: np.ndarray
    sampling: SamplingParams
    seed: int
    rid: str
    return_sampling_mask: bool = False
    lora_path: str | None = None
    batch_key: int = 0
    min_weight_version: int = 0


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """`tokens` int64 [n], `log_probs` float32 [n], `version_spans` int64 [S, 2] = (weight version, tokens)."""

    rid: str
    tokens: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    weight_version: int
    version_spans: np.ndarray
    sampling_mask: RolloutSamplingMask | None = None

    @property
    def support_log_probs(self) -> np.ndarray:
        """float32 [n]: log-prob of each drawn token among the kept ones. Needs the sampling mask's own log-probs."""
        mask = self.sampling_mask
        if mask is None or mask.log_probs is None:
            raise EngineReplyError(f"request {self.rid}: the reply has no sampling mask with log-probs")
        hit = mask.ids == np.repeat(self.tokens, np.diff(mask.offsets))
        return mask.log_probs[hit]


def batch_body(requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """The list form of `/generate`; all requests agree on the optional flags."""
    first = requests[0]
    body: dict[str, Any] = {
        "input_ids": [r.input_ids for r in requests],
        "sampling_params": [{**r.sampling.wire, "sampling_seed": r.seed} for r in requests],
        "rid": [r.rid for r in requests],
        "return_logprob": True,
    }
    if first.return_sampling_mask:
        body["return_sampling_mask"] = True
    if first.lora_path is not None:
        body["lora_path"] = first.lora_path
    if first.min_weight_version:
        body["min_weight_version"] = first.min_weight_version
    return body


def read_replies(
    replies: Any, requests: Sequence[GenerateRequest], *, vocab_size: int, engine: str
) -> list[GenerateResult]:
    """Check a list reply against the contract. `EngineReplyError` names engine, request, field and value."""
    if not isinstance(replies, list) or len(replies) != len(requests):
        got = len(replies) if isinstance(replies, list) else type(replies).__name__
        raise EngineReplyError(f"engine {engine}: /generate answered {got} for {len(requests)} requests")
    metas = [_meta(reply, request, engine) for reply, request in zip(replies, requests, strict=True)]
    pairs = list(chain.from_iterable(meta["output_token_logprobs"] for meta in metas))
    counts = [meta["completion_tokens"] for meta in metas]
    ends = np.cumsum(counts).tolist()
    log_probs, tokens = _flat_arrays(pairs, requests, ends, vocab_size, engine)
    versions, spans = _all_versions(metas, counts, requests, engine)
    masks = _masks(metas, requests, tokens, counts, vocab_size, engine)
    results = []
    start = 0
    for meta, request, end, version, runs, mask in zip(metas, requests, ends, versions, spans, masks, strict=True):
        results.append(
            GenerateResult(
                rid=request.rid,
                tokens=tokens[start:end],
                log_probs=log_probs[start:end],
                finish_reason=meta["finish_reason"]["type"],
                prompt_tokens=meta["prompt_tokens"],
                cached_tokens=meta.get("cached_tokens", 0),
                weight_version=version,
                version_spans=runs,
                sampling_mask=mask,
            )
        )
        start = end
    return results


def _refuse(engine: str, rid: str, what: str) -> NoReturn:
    raise EngineReplyError(f"engine {engine}, request {rid}: {what}")


def _meta(reply: Any, request: GenerateRequest, engine: str) -> Mapping[str, Any]:
    rid = request.rid
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(meta, dict):
        _refuse(engine, rid, "the reply has no meta_info object")
    if meta.get("id") != rid:
        _refuse(engine, rid, f"the reply is for request {meta.get('id')!r}")
    pairs, count = meta.get("output_token_logprobs"), meta.get("completion_tokens")
    if type(count) is not int or not isinstance(pairs, list) or len(pairs) != count:
        got = len(pairs) if isinstance(pairs, list) else pairs
        _refuse(engine, rid, f"output_token_logprobs has {got} entries, completion_tokens is {count!r}")
    if meta.get("prompt_tokens") != len(request.input_ids):
        _refuse(engine, rid, f"prompt_tokens is {meta.get('prompt_tokens')!r}, sent were {len(request.input_ids)}")
    finish = meta.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, dict) else finish
    if not isinstance(finish, dict) or kind not in FINISH_REASONS:
        _refuse(engine, rid, f"finish_reason {kind!r} is none of {', '.join(sorted(FINISH_REASONS))}")
    if count == 0 and kind != "abort":
        _refuse(engine, rid, f"no token was produced, but finish_reason is {kind!r}")
    if count > request.sampling.max_new_tokens:
        _refuse(engine, rid, f"{count} tokens came back, asked for were {request.sampling.max_new_tokens}")
    return meta


def _flat_arrays(
    pairs: list[Any], requests: Sequence[GenerateRequest], ends: list[int], vocab_size: int, engine: str
) -> tuple[np.ndarray, np.ndarray]:
    """(log-probs float32, ids int64) of all replies in one go; the first entry at fault is named."""
    log_probs: np.ndarray | None
    try:
        log_probs = np.array([pair[0] for pair in pairs], dtype=np.float64)
        ids = [pair[1] for pair in pairs]
        tokens = np.array(ids, dtype=np.int64) if set(map(type, ids)) <= {int} else None
    except (TypeError, ValueError, IndexError, KeyError, OverflowError):
        log_probs = tokens = None
    if log_probs is None or tokens is None:
        at = next(i for i, pair in enumerate(pairs) if not _is_pair(pair))
        _refuse(engine, *_place(at, requests, ends, f"entry {pairs[at]!r} is not [log-prob, id, ...]"))
    wrong = ~np.isfinite(log_probs) | (log_probs > LOG_PROB_SLACK)
    if wrong.any():
        at = int(np.argmax(wrong))
        _refuse(engine, *_place(at, requests, ends, f"log-prob {log_probs[at]} is not finite and <= 0"))
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if wrong.any():
        at = int(np.argmax(wrong))
        _refuse(engine, *_place(at, requests, ends, f"id {tokens[at]} is outside the vocabulary [0, {vocab_size})"))
    return log_probs.astype(np.float32), tokens


def _is_pair(pair: Any) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) < 2:
        return False
    return type(pair[0]) in (int, float) and type(pair[1]) is int and abs(pair[1]) < 1 << 63


def _place(at: int, requests: Sequence[GenerateRequest], ends: list[int], what: str) -> tuple[str, str]:
    index = int(np.searchsorted(ends, at, side="right"))
    start = ends[index - 1] if index else 0
    return requests[index].rid, f"output_token_logprobs[{at - start}]: {what}"


def is_version(text: Any) -> bool:
    """A decimal string below 10^18, so that it fits int64 and `int` reads it."""
    return isinstance(text, str) and 0 < len(text) <= 18 and text.isascii() and text.isdigit()


def _all_versions(
    metas: Sequence[Mapping[str, Any]], counts: Sequence[int], requests: Sequence[GenerateRequest], engine: str
) -> tuple[list[int], list[np.ndarray]]:
    """The version that ended each reply, and its runs of versions, int64 [S, 2]."""
    known: dict[str, int] = {}
    versions = []
    for meta, request in zip(metas, requests, strict=True):
        text = meta.get("weight_version")
        if type(text) is not str or text not in known:
            if not isinstance(text, str) or not is_version(text):
                _refuse(engine, request.rid, f"weight_version {str(text)[:80]!r} is not a decimal string")
            known[text] = int(text)
        versions.append(known[text])
    # Nearly all replies are of one version: rows of one array, and others where a reply says so.
    runs = list(np.stack((versions, counts), axis=1).astype(np.int64).reshape(-1, 1, 2))
    for index, (meta, count) in enumerate(zip(metas, counts, strict=True)):
        if meta.get("weight_version_spans") is not None:
            runs[index] = _version_runs(meta["weight_version_spans"], count, requests[index], engine)
        elif not count:
            runs[index] = runs[index][:0]
    return versions, runs


def _version_runs(spans: Any, count: int, request: GenerateRequest, engine: str) -> np.ndarray:
    try:
        array = np.array([[int(v), n] for v, n in spans], dtype=np.int64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        array = None
    if array is None or int(array[:, 1].sum()) != count or (len(array) and array[:, 1].min() < 1):
        _refuse(engine, request.rid, f"weight_version_spans {str(spans)[:200]} do not add up to {count} tokens")
    return array


def _masks(
    metas: Sequence[Mapping[str, Any]],
    requests: Sequence[GenerateRequest],
    tokens: np.ndarray,
    counts: Sequence[int],
    vocab_size: int,
    engine: str,
) -> list[RolloutSamplingMask | None]:
    """Each request's mask, or None where none was asked for. Well-formed replies are checked all at once."""
    if not all(request.return_sampling_mask for request in requests):
        ends = np.cumsum(counts).tolist()
        return [
            _mask(meta, request, tokens[end - n : end], vocab_size, engine) if request.return_sampling_mask else None
            for meta, request, end, n in zip(metas, requests, ends, counts, strict=True)
        ]
    try:
        whole = _joined_mask([meta["output_sampling_mask"] for meta in metas], counts, vocab_size)
        whole.require_tokens(tokens)
    except (KeyError, TypeError, ValueError, IndexError):
        ends = np.cumsum(counts).tolist()
        # One reply is wrong: reading them one by one names it.
        return [
            _mask(meta, request, tokens[end - n : end], vocab_size, engine)
            for meta, request, end, n in zip(metas, requests, ends, counts, strict=True)
        ]
    bounds = np.cumsum([0, *counts]).tolist()
    return [whole.select(range(a, b)) for a, b in pairwise(bounds)]


def _joined_mask(wires: Sequence[Mapping[str, Any]], counts: Sequence[int], vocab_size: int) -> RolloutSamplingMask:
    """All rows in one mask. `ValueError` when a reply's offsets do not fit its own ids or tokens."""
    ids: list[int] = []
    log_probs: list[float] = []
    offsets = [0]
    for wire, count in zip(wires, counts, strict=True):
        own, base = wire["offsets"], len(ids)
        if len(own) != count + 1 or own[0] != 0 or own[-1] != len(wire["ids"]):
            raise ValueError("offsets do not fit")
        ids += wire["ids"]
        log_probs += wire.get("logprobs", ())
        offsets += [base + at for at in own[1:]]
    # A reply without log-probs beside others that have them does not fit, and is named by the caller.
    return RolloutSamplingMask(
        np.array(ids, dtype=None if ids else np.int64),
        np.array(offsets),
        vocab_size,
        np.array(log_probs) if log_probs else None,
    )


def _mask(
    meta: Mapping[str, Any], request: GenerateRequest, tokens: np.ndarray, vocab_size: int, engine: str
) -> RolloutSamplingMask:
    wire = meta.get("output_sampling_mask")
    if not isinstance(wire, dict):
        _refuse(engine, request.rid, "the reply has no output_sampling_mask although it was asked for")
    try:
        ids = np.array(wire["ids"], dtype=None if wire["ids"] else np.int64)
        mask = RolloutSamplingMask(ids, np.array(wire["offsets"], dtype=np.int64), vocab_size, wire.get("logprobs"))
        mask.require_tokens(tokens)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineReplyError(f"engine {engine}, request {request.rid}: output_sampling_mask: {error}") from error
    return mask

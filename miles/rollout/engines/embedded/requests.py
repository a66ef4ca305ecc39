"""Requests of the embedded engine: the JSON body of `/generate` in, records for the scheduler out, replies back.

Accepts SGLang's single and list forms. Whatever would be ignored is refused with the option's name.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import numpy as np

_BODY_KEYS = frozenset({
    "input_ids", "sampling_params", "return_logprob", "rid", "return_sampling_mask", "stream", "logprob_start_len",
    "top_logprobs_num", "return_routed_experts", "lora_path", "return_text_in_logprobs", "min_weight_version",
})  # fmt: skip
_PARAM_KEYS = frozenset({
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "sampling_seed",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "n",
})  # fmt: skip


class BadRequest(Exception):
    """Answered with HTTP 400; the text names the option and what is accepted."""


@dataclass(slots=True)
class Refusal:
    """Why a request got no result: HTTP status, stable kind, text."""

    status: int
    kind: str
    message: str


@dataclass(slots=True)
class Output:
    """What one request produced. `spans`: (weight version, token count), in order."""

    tokens: list[int]
    log_probs: list[float]
    finish: dict[str, Any]
    cached_tokens: int
    spans: list[tuple[int, int]]
    support: list[tuple[np.ndarray, np.ndarray]] | None = None


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
    support: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def settle(self, result: Output | Refusal) -> None:
        assert self.job is not None
        self.job.settle(self.index, result)


@dataclass(frozen=True, slots=True)
class Limits:
    vocab_size: int
    context_length: int
    max_total_tokens: int
    eos_ids: tuple[int, ...]


def parse_generate(body: Any, limits: Limits) -> tuple[list[EngineRequest], bool]:
    """(requests, whether the reply is a list). `BadRequest` names the option at fault."""
    if not isinstance(body, dict):
        raise BadRequest(f"body: expected a JSON object, got {type(body).__name__}")
    unknown = body.keys() - _BODY_KEYS
    if unknown:
        raise BadRequest(_unknown(unknown, "body"))
    _refuse_body_options(body)
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise BadRequest("input_ids: expected a non-empty list of token ids, or a list of such lists")
    batched = isinstance(ids[0], list)
    rows: list[list[int]] = ids if batched else [ids]
    count = len(rows)
    prompts = _prompts(rows, limits)
    params = _spread(body.get("sampling_params") or {}, count, "sampling_params", dict)
    rids = _spread_rids(body.get("rid"), count)
    want = _spread(body.get("return_sampling_mask") or False, count, "return_sampling_mask", bool)
    min_version = _integer(body, "min_weight_version", 0, 0, (1 << 63) - 1, where="body")
    requests = []
    last: dict[str, Any] | None = None
    for i in range(count):
        given = params[i]
        if "sampling_seed" in given:
            given = given.copy()
            seed = _seed(given.pop("sampling_seed"))
        else:
            seed = secrets.randbits(64)
        if given != last:
            last, sampling = given, _sampling(given, limits)
        _check_room(len(prompts[i]), sampling.max_new, limits)
        requests.append(EngineRequest(rids[i], prompts[i], sampling, seed, want[i], min_version))
    return requests, batched


def _refuse_body_options(body: Mapping[str, Any]) -> None:
    if body.get("stream"):
        raise BadRequest("stream: the embedded engine answers whole results; send stream=false")
    for key in ("return_routed_experts", "lora_path"):
        value = body.get(key)
        if any(value) if isinstance(value, list) else value:
            raise BadRequest(f"{key}: not offered by this engine, see capabilities in /server_info; use SGLang")
    if body.get("top_logprobs_num"):
        raise BadRequest("top_logprobs_num: not offered; only the drawn token's log-prob is returned")
    if body.get("logprob_start_len") not in (None, -1):
        raise BadRequest("logprob_start_len: prompt log-probs are not offered; leave it out")


def _unknown(keys: set[str], where: str) -> str:
    names = ", ".join(sorted(keys))
    hint = " (this engine takes token ids: encode the text and send input_ids)" if "text" in keys else ""
    return f"{where}: unsupported option {names}{hint}; remove it"


def _prompts(rows: list[list[int]], limits: Limits) -> list[np.ndarray]:
    if not all(type(row) is list and row for row in rows):
        raise BadRequest("input_ids: every prompt must be a non-empty list of token ids")
    flat_list = list(chain.from_iterable(rows))
    if set(map(type, flat_list)) != {int}:
        raise BadRequest("input_ids: token ids must be integers")
    try:
        flat = np.array(flat_list, dtype=np.int64)
    except OverflowError:
        raise BadRequest("input_ids: a token id does not fit 64 bits") from None
    if flat.min() < 0 or flat.max() >= limits.vocab_size:
        bad = flat[(flat < 0) | (flat >= limits.vocab_size)][0]
        raise BadRequest(f"input_ids: token id {bad} is outside the vocabulary [0, {limits.vocab_size})")
    ends = np.cumsum([len(row) for row in rows]).tolist()
    return [flat[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _spread(value: Any, count: int, name: str, kind: type) -> list[Any]:
    if isinstance(value, list):
        if len(value) != count or not all(isinstance(v, kind) for v in value):
            raise BadRequest(f"{name}: expected one {kind.__name__} or a list of {count}")
        return value
    if not isinstance(value, kind):
        raise BadRequest(f"{name}: expected one {kind.__name__} or a list of {count}")
    return [value] * count


def _spread_rids(value: Any, count: int) -> list[str]:
    if value is None:
        return [secrets.token_hex(16) for _ in range(count)]
    if isinstance(value, str):
        return [value] if count == 1 else [f"{value}_{i}" for i in range(count)]
    if isinstance(value, list) and len(value) == count and set(map(type, value)) <= {str}:
        return value
    raise BadRequest(f"rid: expected a text or a list of {count} texts")


def _number(params: Mapping[str, Any], key: str, default: float, lo: float, hi: float) -> float:
    value = params.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not lo <= value <= hi:
        raise BadRequest(f"sampling_params.{key}: {value!r} is not a number from {lo:g} to {hi:g}")
    return value


def _integer(
    params: Mapping[str, Any], key: str, default: int, lo: int, hi: int, *, where: str = "sampling_params"
) -> int:
    value = params.get(key)
    if value is None:
        return default
    if type(value) is not int or not lo <= value <= hi:
        raise BadRequest(f"{where}.{key}: {value!r} is not an integer from {lo} to {hi}")
    return value


def _seed(value: Any) -> int:
    if value is None:
        return secrets.randbits(64)
    if type(value) is not int or not -(1 << 63) <= value < 1 << 64:
        raise BadRequest(f"sampling_params.sampling_seed: {value!r} is not an integer of 64 bits")
    return value & ((1 << 64) - 1)


def _check_room(prompt: int, max_new: int, limits: Limits) -> None:
    most = min(limits.context_length, limits.max_total_tokens)
    if prompt + max_new > most:
        raise BadRequest(
            f"sampling_params.max_new_tokens: prompt {prompt} + new {max_new} tokens is above the limit {most}; "
            "shorten one, or raise engine.context_length or engine.max_total_tokens"
        )


def _sampling(params: Mapping[str, Any], limits: Limits) -> Sampling:
    unknown = params.keys() - _PARAM_KEYS
    if unknown:
        raise BadRequest(_unknown(unknown, "sampling_params"))
    if params.get("n", 1) != 1:
        raise BadRequest("sampling_params.n: send the prompt n times, each with its own sampling_seed")
    stops = params.get("stop_token_ids") or []
    if not isinstance(stops, list) or not set(map(type, stops)) <= {int}:
        raise BadRequest("sampling_params.stop_token_ids: expected a list of token ids")
    ignore_eos = params.get("ignore_eos") or False
    return Sampling(
        max_new=_integer(params, "max_new_tokens", 128, 1, 1 << 31),
        temperature=_number(params, "temperature", 1.0, 0.0, 1e4),
        top_p=_number(params, "top_p", 1.0, 1e-9, 1.0),
        top_k=_integer(params, "top_k", -1, -1, 1 << 31),
        min_p=_number(params, "min_p", 0.0, 0.0, 1.0),
        stop_ids=tuple(stops) if ignore_eos else (*limits.eos_ids, *stops),
    )


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

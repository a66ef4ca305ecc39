"""The JSON body of `/generate` as requests. Accepts SGLang's single and list forms.

Every field is bounded here; whatever would be ignored is refused with the option's name.
"""

from __future__ import annotations

import secrets
from itertools import chain
from typing import Any

import numpy as np

from miles.rollout.engines.embedded.fields import TEXT, BadRequest, Fields, shown
from miles.rollout.engines.embedded.requests import EngineRequest, Limits, Sampling

MAX_PROMPTS = 8192
MAX_STOPS = 256
# Below this, logits divided by the temperature leave float32; 0 is greedy.
MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 1e4
INT64 = (1 << 63) - 1


def parse_generate(body: Any, limits: Limits) -> tuple[list[EngineRequest], bool]:
    """(requests, whether the reply is a list). `BadRequest` names the option at fault."""
    if not isinstance(body, dict):
        raise BadRequest("body", f"expected a JSON object, got {type(body).__name__}")
    if "text" in body:
        raise BadRequest("text", "this engine takes token ids: encode the text and send input_ids")
    fields = Fields(body)
    ids = fields.items("input_ids", most=limits.most_ids)
    if not ids:
        raise fields.bad("input_ids", "expected a non-empty list of token ids, or a list of such lists")
    batched = isinstance(ids[0], list)
    rows: list[list[int]] = ids if batched else [ids]
    count = len(rows)
    if count > MAX_PROMPTS:
        raise fields.bad("input_ids", f"{count} prompts; at most {MAX_PROMPTS} in one request")
    prompts = _prompts(rows, limits)
    params = _spread(fields.take("sampling_params", {}), count, "sampling_params", dict)
    rids = _spread_rids(fields.take("rid", None), count)
    want = _spread(fields.take("return_sampling_mask", False), count, "return_sampling_mask", bool)
    min_version = fields.integer("min_weight_version", 0, INT64, 0)
    _other_options(fields, count)
    fields.done()
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


def _other_options(fields: Fields, count: int) -> None:
    """Options of SGLang's body: taken where they ask for nothing, refused by name where they do."""
    for name in ("return_logprob", "return_text_in_logprobs", "return_routed_experts"):
        asked = _spread(fields.take(name, False), count, name, bool)
        if name == "return_routed_experts" and any(asked):
            raise fields.bad(name, "not offered by this engine, see capabilities in /server_info; use SGLang")
    if fields.flag("stream", False):
        raise fields.bad("stream", "the embedded engine answers whole results; send stream=false")
    lora = fields.take("lora_path", None)
    if lora is not None and not (isinstance(lora, list) and not any(lora)):
        raise fields.bad("lora_path", "not offered by this engine, see capabilities in /server_info; use SGLang")
    if fields.integer("top_logprobs_num", 0, INT64, 0):
        raise fields.bad("top_logprobs_num", "not offered; only the drawn token's log-prob is returned")
    if fields.integer("logprob_start_len", -1, INT64, -1) != -1:
        raise fields.bad("logprob_start_len", "prompt log-probs are not offered; leave it out")


def _prompts(rows: list[list[int]], limits: Limits) -> list[np.ndarray]:
    if not all(type(row) is list and row for row in rows):
        raise BadRequest("input_ids", "every prompt must be a non-empty list of token ids")
    flat_list = list(chain.from_iterable(rows))
    if set(map(type, flat_list)) != {int}:
        raise BadRequest("input_ids", "token ids must be integers")
    try:
        flat = np.array(flat_list, dtype=np.int64)
    except OverflowError:
        raise BadRequest("input_ids", "a token id does not fit 64 bits") from None
    if flat.min() < 0 or flat.max() >= limits.vocab_size:
        bad = flat[(flat < 0) | (flat >= limits.vocab_size)][0]
        raise BadRequest("input_ids", f"token id {bad} is outside the vocabulary [0, {limits.vocab_size})")
    ends = np.cumsum([len(row) for row in rows]).tolist()
    return [flat[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _spread(value: Any, count: int, name: str, kind: type) -> list[Any]:
    if isinstance(value, list):
        if len(value) != count or not all(isinstance(v, kind) for v in value):
            raise BadRequest(name, f"expected one {kind.__name__} or a list of {count}")
        return value
    if not isinstance(value, kind):
        raise BadRequest(name, f"expected one {kind.__name__} or a list of {count}")
    return [value] * count


def _spread_rids(value: Any, count: int) -> list[str]:
    if value is None:
        return [secrets.token_hex(16) for _ in range(count)]
    if isinstance(value, str) and 0 < len(value) <= TEXT:
        return [value] if count == 1 else [f"{value}_{i}" for i in range(count)]
    if isinstance(value, list) and len(value) == count and all(type(v) is str and 0 < len(v) <= TEXT for v in value):
        return value
    raise BadRequest("rid", f"expected a text or a list of {count} texts, of 1 to {TEXT} characters each")


def _seed(value: Any) -> int:
    if value is None:
        return secrets.randbits(64)
    if type(value) is not int or not -(1 << 63) <= value < 1 << 64:
        raise BadRequest("sampling_params.sampling_seed", f"{shown(value)} is not an integer of 64 bits")
    return value & ((1 << 64) - 1)


def _check_room(prompt: int, max_new: int, limits: Limits) -> None:
    most = limits.most_tokens
    if prompt + max_new > most:
        raise BadRequest(
            "sampling_params.max_new_tokens",
            f"prompt {prompt} + new {max_new} tokens is above the limit {most}; "
            "shorten one, or raise engine.context_length or engine.max_total_tokens",
        )


def _sampling(params: dict[str, Any], limits: Limits) -> Sampling:
    fields = Fields(params, "sampling_params")
    if fields.integer("n", 1, INT64, 1) != 1:
        raise fields.bad("n", "send the prompt n times, each with its own sampling_seed")
    for ignored in ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"):
        fields.flag(ignored, True)  # about text, of which this engine has none
    stops = fields.items("stop_token_ids", (), most=MAX_STOPS)
    if not all(type(stop) is int and 0 <= stop < limits.vocab_size for stop in stops):
        raise fields.bad("stop_token_ids", f"expected token ids in the vocabulary [0, {limits.vocab_size})")
    temperature = fields.number("temperature", 0.0, MAX_TEMPERATURE, 1.0)
    if 0.0 < temperature < MIN_TEMPERATURE:
        raise fields.bad("temperature", f"{temperature!r} is neither 0 (greedy) nor at least {MIN_TEMPERATURE:g}")
    ignore_eos = fields.flag("ignore_eos", False)
    sampling = Sampling(
        max_new=fields.integer("max_new_tokens", 1, 1 << 31, 128),
        temperature=temperature,
        top_p=fields.number("top_p", 1e-9, 1.0, 1.0),
        top_k=fields.integer("top_k", -1, 1 << 31, -1),
        min_p=fields.number("min_p", 0.0, 1.0, 0.0),
        stop_ids=tuple(stops) if ignore_eos else (*limits.eos_ids, *stops),
    )
    fields.done()
    return sampling

"""Reward kind `remote_http`."""

from __future__ import annotations

import json
import re
from typing import Any

from miles.config import ConfigError
from miles.data.sample import Sample
from miles.rollout.rewards.function import RewardContext, RewardFn, Value
from miles.rollout.rewards.options import read_options

MAX_REPLY = 1 << 20


def remote_http(options: dict[str, Any]) -> RewardFn:
    """POST {prompt, completion, answer, metadata, sample_id} to `url`; the reply is {"reward": number, parts...}."""
    url = read_options("remote_http", options, url=(str, None))["url"]
    if not re.match(r"https?://[^/\s]+", url):
        raise ConfigError(f"rollout.reward.options.url: {url!r} is no address; write it as http://host:port/path")

    async def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        import aiohttp

        body = {
            "sample_id": sample.sample_id,
            "prompt": ctx.prompt.text,
            "completion": completion,
            "answer": ctx.prompt.answer,
            "metadata": ctx.prompt.metadata,
        }
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
            raw = await _bounded(reply, url)
            if reply.status != 200:
                raise ValueError(f"{url} answered {reply.status}: {raw[:200].decode(errors='replace')}")
        return _value(raw, url)

    return RewardFn("remote_http", awaited=score, text_answers=False)


async def _bounded(reply: Any, url: str) -> bytes:
    """A service that streams without end costs no more memory than this."""
    parts = b""
    async for part in reply.content.iter_chunked(1 << 16):
        parts += part
        if len(parts) > MAX_REPLY:
            raise ValueError(f"{url} answered more than {MAX_REPLY >> 20} MiB")
    return parts


def _value(raw: bytes, url: str) -> dict[str, float]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{url} answered no JSON: {error}: {raw[:200].decode(errors='replace')}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{url} answered {str(value)[:200]}, expected an object with 'reward'")
    return value

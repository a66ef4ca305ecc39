"""A stand-in for `EngineClient`: deterministic tokens from the seed, optional delays, versions and aborts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import numpy as np

from miles.rollout.engine import EngineInfo, GenerateRequest, GenerateResult


class FakeEngine:
    url = "fake"

    def __init__(
        self,
        *,
        version: int = 0,
        delay: Callable[[GenerateRequest], float] | None = None,
        finish: Callable[[GenerateRequest], tuple[str, int]] | None = None,
        context_length: int = 64,
        holds_requests: bool = False,
    ) -> None:
        self.version = version
        self.requests: list[GenerateRequest] = []
        self._delay = delay
        self._finish = finish or (lambda r: ("stop", min(3, r.sampling.max_new_tokens)))
        self._context = context_length
        self._capabilities = frozenset({"sampling_mask"} | ({"min_weight_version"} if holds_requests else set()))
        self._changed = asyncio.Condition()

    async def serve(self, version: int) -> None:
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def info(self) -> EngineInfo:
        return EngineInfo("fake", "fake", "1", self._capabilities, self._context, 16)

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        return list(await asyncio.gather(*(self._one(r) for r in requests)))

    async def _one(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= request.min_weight_version)
        version = self.version
        if self._delay is not None:
            await asyncio.sleep(self._delay(request))
        kind, n = self._finish(request)
        # Continuing a partial response draws what one call would have drawn.
        tokens = [random.Random(request.seed * 1000 + len(request.input_ids) + i).randrange(2, 16) for i in range(n)]
        return GenerateResult(
            rid=request.rid,
            tokens=np.array(tokens, dtype=np.int64),
            log_probs=np.full(n, -1.0, dtype=np.float32),
            finish_reason=kind,
            prompt_tokens=len(request.input_ids),
            cached_tokens=0,
            weight_version=version,
            version_spans=np.array([[version, n]] if n else [], dtype=np.int64).reshape(-1, 2),
        )


class FakePrompts:
    """Prompts 0, 1, 2, ...; the score is a function of (completion, prompt)."""

    def __init__(self, score: Callable[[str, object], float] = lambda text, prompt: float(text.count("a"))) -> None:
        from miles.data.prompts import Prompt

        self._make = lambda i: Prompt(i, np.array([2, 3, i % 16], dtype=np.int64), f"p{i}", "abc", {"i": i})
        self.score = score
        self.next = 0

    def next_groups(self, count):
        start, self.next = self.next, self.next + count
        return [self._make(i) for i in range(start, start + count)]

    def state(self):
        return {"next_index": self.next}

    def restore(self, state):
        self.next = state["next_index"]


class Letters:
    """Decodes ids to letters."""

    def decode_batch(self, rows):
        return ["".join(chr(97 + int(t) % 3) for t in row) for row in rows]

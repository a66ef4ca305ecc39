"""Malformed requests against every route of a running engine, while well-formed ones are answered and weights are pushed.

    python benchmarks/fuzz_engine.py --requests 100000

Exit code 0 only if: every malformed request was refused with 4xx (one that happens to be a valid generation may be
answered), every well-formed reply is the expected one bit for bit, the weights and the engine's state are what the
pushes made them, and resident memory and descriptors of the engine have not grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

WORKERS = 24
WELL_FORMED = 8
WARM_UP = 2000
RSS_SLACK = 48 << 20
FD_SLACK = 4

HUGE = "9" * 5000
WRONG: dict[str, list[Any]] = {
    "text": [0, 1.5, True, [], {}, ["a"], "", "x" * 300, "a\0b", {"a": [1]}],
    "count": [-1, 1.5, "1", True, [], {}, 2**63, 2**64 - 1, -(2**63), 1e300, HUGE, [[[1]]]],
    "seconds": [-1, 0, 1e300, 1e9, "1", True, [], {}, -1e-300, HUGE],
    "version": [0, -1, "-1", "01", "1.0", " 1", HUGE, str(2**63), "", [], {}, True, "x", "1" * 20],
    "selector": ["some", [], [1], [""], ["x" * 300], {}, 1, [["all"]], ["m"] * 300, True],
    "choice": ["none of them", "", 0, True, [], {}, ["retract"], "\0"],
    "flag": [0, 1, "true", [], {}],
    "object": [0, "x", [], True, [[]]],
    "list": [0, "x", {}, True, [1, 2, 3], [[[]]], ["x" * 300], [None]],
    "schema": [0, 2, "1", True, [], 1.5, 2**63],
    "path": ["", "relative", "../x", "/a\0b", 0, [], {}, "/" + "x" * 5000],
}
SESSION = {"session": "text", "plan_digest": "text", "selector": "selector", "weight_version": "version"}
BEGIN = {"schema": "schema", "run_id": "text", "weight_version": "version", "selector": "selector",
         "plan_digest": "text", "table_digest": "text", "engine_epoch": "text", "pause": "choice",
         "timeout_s": "seconds"}  # fmt: skip
GROUP = {"group_name": "text", "master_address": "text", "master_port": "count", "rank_offset": "count",
         "world_size": "count", "backend": "choice", "timeout_s": "seconds"}  # fmt: skip
# Route -> field -> kind of the wrong values that it gets. Each request has one wrong field at least.
FIELDS: dict[str, dict[str, str]] = {
    "/pause_generation": {"mode": "choice", "owner": "text"},
    "/continue_generation": {"owner": "text"},
    "/abort_request": {"rid": "text", "abort_all": "flag", "prefix": "flag"},
    "/flush_cache": {"now": "flag"},
    "/release_memory_occupation": {"tags": "list"},
    "/resume_memory_occupation": {"tags": "list"},
    "/begin_weight_update": BEGIN,
    "/update_weights_from_tensor": {
        **SESSION, "bucket": "object", "handle": "object", "load_format": "choice", "flush_cache": "flag",
    },
    "/update_weights_from_distributed": {**SESSION, "bucket": "object", "group_name": "text"},
    "/update_weights_from_disk": {**SESSION, "load_format": "choice", "model_path": "path", "deltas": "list"},
    "/init_weights_update_group": GROUP,
    "/destroy_weights_update_group": {"group_name": "text"},
    "/end_weight_update": {**SESSION, "buckets": "count"},
    "/abort_weight_update": {"session": "text", "reason": "text"},
}  # fmt: skip
GENERATE = {"input_ids": "list", "rid": "text", "return_logprob": "flag", "return_sampling_mask": "flag",
            "stream": "flag", "top_logprobs_num": "count", "logprob_start_len": "count", "lora_path": "object",
            "min_weight_version": "count", "return_routed_experts": "flag", "sampling_params": "list"}  # fmt: skip
PARAMS = {"max_new_tokens": "count", "temperature": "seconds", "top_p": "seconds", "top_k": "object", "min_p": "text",
          "stop_token_ids": "list", "ignore_eos": "flag", "sampling_seed": "text", "n": "version",
          "skip_special_tokens": "flag", "no_stop_trim": "flag"}  # fmt: skip
GETS = ("/health_generate", "/model_info", "/server_info", "/parameter_table", "/weight_status", "/parameter_digests")
NOT_OBJECTS = [b"{", b"[", b"nul", b"1", b'"x"', b"[1]", b"{'a': 1}", b'{"a": NaN}', b'{"a": 1e999}x', b"\xff\xfe",
               b'{"a": "\\ud800"}', b"\x00" * 100, b"[" * 5000, b'{"a":' * 3000 + b"1" + b"}" * 3000]  # fmt: skip


class Malformed:
    """Seeded source of (method, path, body, headers that replace the right ones)."""

    def __init__(self, seed: int, begin: dict[str, Any]) -> None:
        self._random = random.Random(seed)
        self._good = {
            "/begin_weight_update": begin,
            "/init_weights_update_group": {
                "group_name": "g", "master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2,
                "backend": "gloo", "timeout_s": 0.01,
            },
        }  # fmt: skip

    def next(self) -> tuple[str, str, bytes | None, dict[str, str] | None]:
        kinds: list[tuple[int, Callable[[], Any]]] = [
            (55, self._fields), (25, self._generate), (8, self._not_an_object), (4, self._no_access), (4, self._nowhere),
            (3, self._stale), (1, self._large),
        ]  # fmt: skip
        return self._random.choices([make for _, make in kinds], [weight for weight, _ in kinds])[0]()

    def _route(self) -> str:
        return self._random.choice([*FIELDS, "/generate"])

    def _fields(self) -> Any:
        path = self._random.choice(list(FIELDS))
        kinds = FIELDS[path]
        body = dict(self._good.get(path, {}))
        for name in self._random.sample(list(kinds), self._random.randint(1, min(3, len(kinds)))):
            body[name] = self._random.choice(WRONG[kinds[name]])
        if self._random.random() < 0.1:
            body["x" * self._random.randint(1, 300)] = 1
        return "POST", path, json.dumps(body).encode(), None

    def _generate(self) -> Any:
        body: dict[str, Any] = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 2}}
        if self._random.random() < 0.5:
            kinds, target = GENERATE, body
        else:
            kinds, target = PARAMS, body["sampling_params"]
        for name in self._random.sample(list(kinds), self._random.randint(1, 2)):
            target[name] = self._random.choice(WRONG[kinds[name]])
        special = [
            ("stop_token_ids", [2**63]),
            ("stop_token_ids", [3] * 5000),
            ("temperature", 1e-42),
            ("top_p", 1e-300),
        ]
        if self._random.random() < 0.2:
            name, value = self._random.choice(special)
            body["sampling_params"] = {"max_new_tokens": 2, name: value}
        return "POST", "/generate", json.dumps(body).encode(), None

    def _not_an_object(self) -> Any:
        body = self._random.choice(NOT_OBJECTS)
        if self._random.random() < 0.3:
            body = self._random.randbytes(self._random.randint(1, 200))
        return "POST", self._route(), b"!" + body if body.strip()[:1] in (b"", b"{") else body, None

    def _no_access(self) -> Any:
        wrong = self._random.choice([{}, {"authorization": "Bearer x"}, {"authorization": "Basic " + "x" * 2000}])
        return self._random.choice(["GET", "POST"]), self._random.choice([*GETS, *FIELDS]), b"{}", wrong

    def _nowhere(self) -> Any:
        if self._random.random() < 0.5:
            return self._random.choice(["PUT", "DELETE", "PATCH"]), self._route(), b"{}", None
        return "POST", "/" + "".join(self._random.choices("abc/._-%20", k=self._random.randint(1, 60))), b"{}", None

    def _stale(self) -> Any:
        """Well-formed weight messages at the wrong time: of no session, of an earlier life, going back."""
        fields = {"session": "nobody", "plan_digest": "p", "selector": "all", "weight_version": "1"}
        choices = [
            ("/end_weight_update", {**fields, "buckets": 1}),
            ("/update_weights_from_disk", {**fields, "load_format": "safetensors", "model_path": "/nothing"}),
            ("/abort_weight_update", {"session": "nobody"}),
            ("/begin_weight_update", {**self._good["/begin_weight_update"], "engine_epoch": "earlier"}),
            ("/begin_weight_update", {**self._good["/begin_weight_update"], "selector": ["vision"]}),
        ]
        path, body = self._random.choice(choices)
        return "POST", path, json.dumps(body).encode(), None

    def _large(self) -> Any:
        return "POST", self._random.choice(list(FIELDS)[:6]), b'{"x": "' + b"y" * (100 << 10) + b'"}', None


def make_model(folder: Path) -> Path:
    from miles.data.tokenizer import build_char_tokenizer
    from miles.models.config import ModelShape
    from miles.models.create import create_checkpoint

    build_char_tokenizer("0123456789=+-*", folder / "tokenizer")
    shape = ModelShape(init_std=0.15)
    return create_checkpoint(folder / "model", family="qwen3", shape=shape, tokenizer_dir=folder / "tokenizer", seed=0)


def footprint(pid: int) -> tuple[int, int]:
    """(resident bytes, open descriptors)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))


class Fuzz:
    """One run against one engine."""

    def __init__(self, url: str, pid: int, token: str, seed: int) -> None:
        from miles.rollout.access import headers

        self.url, self.pid, self.token, self.seed = url, pid, token, seed
        self.access = headers(token)
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []
        self.answered = self.pushes = 0
        self.stop = asyncio.Event()

    async def get(self, path: str) -> Any:
        async with self.http.get(self.url + path, headers=self.access) as reply:
            return await reply.json()

    async def state(self) -> dict[str, Any]:
        weights, info = await self.get("/weight_status"), await self.get("/server_info")
        kept = {
            key: weights[key] for key in ("state", "engine_epoch", "table_digest", "reason", "kv_cache", "open_handles")
        }
        digests = (await self.get("/parameter_digests"))["digests"]
        return {**kept, "digests": digests, "pauses": info["pauses"], "capabilities": info["capabilities"]}

    async def run(self, count: int, push_every_s: float) -> dict[str, Any]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as self.http:
            about = await self.get("/parameter_table")
            begin = {
                "schema": 1, "run_id": "fuzz", "weight_version": "1", "selector": "all", "plan_digest": "p",
                "table_digest": about["tables"][0]["table_digest"], "engine_epoch": about["engine_epoch"],
                "pause": "abort", "timeout_s": 5.0,
            }  # fmt: skip
            source = Malformed(self.seed, begin)
            self.expected = [await self.ask(number) for number in range(WELL_FORMED)]
            before_state = await self.state()
            helpers = [asyncio.create_task(self.well_formed(number)) for number in range(WELL_FORMED)]
            helpers.append(asyncio.create_task(self.push(push_every_s)))
            await self.malformed(source, min(WARM_UP, count))
            before = footprint(self.pid)
            start = time.perf_counter()
            await self.malformed(source, max(count - WARM_UP, 0))
            seconds = time.perf_counter() - start
            self.stop.set()
            await asyncio.gather(*helpers)
            if (after_state := await self.state()) != before_state:
                self.faults.append(f"state changed: {before_state} -> {after_state}")
            served = int((await self.get("/model_info"))["weight_version"])
            if served != self.pushes:
                self.faults.append(f"version {served} is served after {self.pushes} pushes")
            if [await self.ask(number) for number in range(WELL_FORMED)] != self.expected:
                self.faults.append("replies differ after the run")
        return {"before": before, "after": footprint(self.pid), "seconds": seconds}

    async def malformed(self, source: Malformed, count: int) -> None:
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                await self.send(*source.next())

        await asyncio.gather(*(worker() for _ in range(WORKERS)))

    async def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None) -> None:
        sent = self.access if headers is None else headers
        async with self.http.request(method, self.url + path, data=body, headers=sent) as reply:
            text = await reply.read()
        self.statuses[reply.status] += 1
        fine = reply.status == 200 and path == "/generate"
        if not fine and not 400 <= reply.status < 500:
            self.faults.append(f"{method} {path} {body!r:.200} was answered {reply.status} {text!r:.200}")

    async def ask(self, number: int) -> Any:
        params = {"max_new_tokens": 24, "temperature": 1.0, "sampling_seed": number, "ignore_eos": True}
        body = {"input_ids": [2 + number, 3, 4, 5, 6], "sampling_params": params, "return_logprob": True}
        async with self.http.post(self.url + "/generate", json=body, headers=self.access) as reply:
            value = await reply.json()
        return value["meta_info"]["output_token_logprobs"] if reply.status == 200 else value

    async def well_formed(self, number: int) -> None:
        while not self.stop.is_set():
            found = await self.ask(number)
            self.answered += 1
            if found != self.expected[number]:
                self.faults.append(f"well-formed request {number} got {found!r:.300}")

    async def push(self, every_s: float) -> None:
        """The same weights again and again, as versions 1, 2, ... : replies must not change by a bit."""
        from miles.sync.config import SyncConfig
        from miles.sync.session import WeightPusher

        with WeightPusher([self.url], SyncConfig(timeout_s=30.0), "fuzz run", token=self.token) as pusher:
            while not self.stop.is_set():
                await asyncio.to_thread(pusher.push, self.weights.items(), self.pushes + 1)
                self.pushes += 1
                await asyncio.sleep(every_s)

    weights: dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--push-every-s", type=float, default=1.0)
    args = parser.parse_args()
    from safetensors.torch import load_file

    from miles.rollout.config import EngineConfig
    from miles.rollout.engines.embedded import launch

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        with launch(EngineConfig(max_running=64, max_total_tokens=16384), model) as engine:
            assert engine.token is not None
            fuzz = Fuzz(engine.url, engine.pid, engine.token, args.seed)
            fuzz.weights = load_file(model / "model.safetensors")
            found = asyncio.run(fuzz.run(args.requests, args.push_every_s))
    (rss, fds), (rss_after, fds_after) = found["before"], found["after"]
    if rss_after - rss > RSS_SLACK or fds_after - fds > FD_SLACK:
        fuzz.faults.append("memory or descriptors of the engine grew")
    statuses = ", ".join(f"{status}: {n}" for status, n in sorted(fuzz.statuses.items()))
    print(
        f"{sum(fuzz.statuses.values())} malformed requests (seed {args.seed}, {found['seconds']:.0f} s; {statuses}), "
        f"{fuzz.answered} well-formed replies, {fuzz.pushes} weight pushes: {len(fuzz.faults)} faults; "
        f"RSS {rss / 2**20:.1f} -> {rss_after / 2**20:.1f} MiB, descriptors {fds} -> {fds_after}"
    )
    for fault in fuzz.faults[:10]:
        print(f"  {fault}", file=sys.stderr)
    return 1 if fuzz.faults else 0


if __name__ == "__main__":
    sys.exit(main())

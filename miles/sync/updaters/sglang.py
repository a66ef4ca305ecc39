"""Updates of an SGLang server through its own routes, with our loader (`miles.weight_wire.server_loader`) inside it.

Order: pause, begin, buckets (no flush, no version), what arrived is checked, end, flush, version, continue. A version
inside a payload would be recorded before the rest has come. SGLang has no dirty state: after a failure it stays paused,
answers nobody, and is for its owner to kill; a whole later update would resume it.
"""

from __future__ import annotations

import base64
import json
import pickle
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

import torch

from miles.sync.engine_link import EngineLink
from miles.sync.entry import SourceSpec
from miles.sync.errors import EngineSyncError
from miles.sync.membership import LiveEngine
from miles.sync.updaters import Message, Update
from miles.sync.updaters.embedded import check_ack
from miles.weight_wire.bucket import BucketHeader, WeightWireError, host_identity
from miles.weight_wire.server_loader import LENGTH_BYTES, MESSAGE, REPLY_BYTES, read_reply
from miles.weight_wire.shared_buffer import SharedBuffer
from miles.weight_wire.table import EngineTable, ParamEntry

LOADER = "miles_weight_loader.load"
POLL_S = 0.02
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
ROUTES = ("/update_weights_from_tensor", "/update_weight_version", "/flush_cache", "/pause_generation")


class SGLangUpdater:
    """Holds, for each engine, the memory in which its loader answers."""

    def __init__(self) -> None:
        self._replies: dict[str, SharedBuffer] = {}
        self._sessions: dict[str, bool] = {}

    def read(self, link: EngineLink, offered: Mapping[str, SourceSpec], *, timeout_s: float) -> LiveEngine:
        """The table is derived: SGLang names none, so whole arrays under the names of the checkpoint, in its one dtype."""
        info = _object(link, "/server_info", timeout_s)
        paths = _object(link, "/openapi.json", timeout_s).get("paths", {})
        version = str(info.get("version", "unknown"))
        lacking = [route for route in ROUTES if route not in paths]
        if lacking:
            raise EngineSyncError(link.url, "capability", f"sglang {version} has no route {', '.join(lacking)}")
        self._sessions[link.url] = "/begin_weight_update" in paths
        for option, plain in (("tp_size", 1), ("pp_size", 1), ("dp_size", 1), ("ep_size", 1), ("quantization", None)):
            if info.get(option, plain) != plain:
                raise EngineSyncError(
                    link.url,
                    "capability",
                    f"{option} is {info[option]}, and only unquantised servers of one rank are updated; start it with {plain}",
                )
        dtype = info.get("dtype")
        if dtype not in ("float32", "bfloat16"):
            raise EngineSyncError(
                link.url, "capability", f"dtype {dtype!r} is not float32 or bfloat16; set engine.dtype"
            )
        entries = tuple(ParamEntry(name, spec.shape, dtype) for name, spec in offered.items())
        host = urllib.parse.urlsplit(link.url).hostname
        return LiveEngine(
            url=link.url,
            # Drawn anew in each life of a server.
            epoch=f"{version}/{info.get('random_seed')}",
            host=host_identity() if host in LOOPBACK else str(host),
            transports=("tensor",),
            table=EngineTable(entries, build=f"sglang {version}", source="derived"),
        )

    def begin(self, link: EngineLink, engine: LiveEngine, update: Update) -> str:
        if update.config.pause == "in_place":
            raise EngineSyncError(
                link.url, "capability", "sync.pause=in_place keeps a cache of older weights, which sglang cannot flush"
            )
        found = f"{engine.epoch.partition('/')[0]}/{_object(link, '/server_info', update.bounded()).get('random_seed')}"
        if found != engine.epoch:
            raise EngineSyncError(link.url, "table_changed", "the server was started anew since it was read")
        self._pause(link, update)
        if self._sessions[link.url]:
            self._open(link, update)
        if link.url not in self._replies:
            self._replies[link.url] = SharedBuffer(REPLY_BYTES)
        return link.url

    def bucket(
        self, link: EngineLink, engine: LiveEngine, update: Update, token: str, header: BucketHeader, message: Message
    ) -> None:
        content = {"kind": "bucket", "bucket": header.to_wire(), "handle": message[1]["handle"]}
        check_ack(link.url, header, self._tell(link, update, content, header.nbytes))

    def folder(
        self, link: EngineLink, engine: LiveEngine, update: Update, token: str, nbytes: int, message: Message
    ) -> None:
        raise EngineSyncError(
            link.url, "capability", "sglang servers take no folders of ours; use sync.transport=tensor"
        )

    def end(self, link: EngineLink, engine: LiveEngine, update: Update, token: str, buckets: int) -> None:
        self._tell(link, update, {"kind": "finish", "buckets": buckets}, 0)
        if self._sessions[link.url]:
            link.plain("POST", "/end_weight_update", {}, timeout_s=update.bounded())
        self._flush(link, update)
        body = {"new_version": str(update.version), "abort_all_requests": False}
        link.plain("POST", "/update_weight_version", body, timeout_s=update.bounded())
        served = _object(link, "/model_info", update.bounded()).get("weight_version")
        if served != str(update.version):
            raise EngineSyncError(link.url, "read_back", f"reports version {served!r}, expected {update.version}")
        link.plain("POST", "/continue_generation", {}, timeout_s=update.bounded())

    def abort(self, link: EngineLink, update: Update, token: str, reason: str) -> None:
        """It stays paused; only its session is closed, so that a later update can open one."""
        if self._sessions[link.url]:
            link.plain("POST", "/end_weight_update", {}, timeout_s=update.bounded())

    def close(self) -> None:
        for memory in self._replies.values():
            memory.close()
        self._replies = {}

    def _pause(self, link: EngineLink, update: Update) -> None:
        link.plain("POST", "/pause_generation", {"mode": update.config.pause}, timeout_s=update.bounded())

    def _open(self, link: EngineLink, update: Update) -> None:
        """Begin; where an update that failed left its session open, that one is closed first: all weights come anew."""
        for again in (True, False):
            try:
                link.plain("POST", "/begin_weight_update", {"selector": "all"}, timeout_s=update.bounded())
                return
            except EngineSyncError as error:
                if error.code != "http_400" or not again:
                    raise
            link.plain("POST", "/end_weight_update", {}, timeout_s=update.bounded())

    def _flush(self, link: EngineLink, update: Update) -> None:
        """Drop every cached prefix. The server refuses while it still puts requests back, so it is asked again."""
        deadline = time.monotonic() + update.bounded()
        while True:
            try:
                link.plain("POST", "/flush_cache", timeout_s=update.bounded())
                return
            except EngineSyncError as error:
                if error.code != "http_400" or time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)

    def _tell(self, link: EngineLink, update: Update, content: dict[str, Any], nbytes: int) -> dict[str, Any]:
        """One message to our loader in the server; its answer. `EngineSyncError` with what it objects to."""
        memory = self._replies[link.url]
        memory.tensor[:LENGTH_BYTES] = 0
        content = {**content, "plan_digest": update.plan.digest, "reply": memory.handle}
        body = {
            "serialized_named_tensors": [_as_tensor(content)],
            "load_format": LOADER,
            "flush_cache": False,
        }
        link.plain("POST", "/update_weights_from_tensor", body, timeout_s=update.bounded(nbytes))
        try:
            reply = read_reply(memory.tensor)
        except (WeightWireError, ValueError) as error:
            raise EngineSyncError(link.url, "bad_ack", str(error)) from error
        if "error" in reply:
            raise EngineSyncError(link.url, "loader", str(reply["error"]))
        return reply


def _as_tensor(content: dict[str, Any]) -> str:
    """JSON as the one uint8 tensor that SGLang's route carries, base64. By value: no memory of torch's is shared, whose
    default strategy between processes that did not fork each other ends the server."""
    raw = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8).clone()
    return base64.b64encode(pickle.dumps([(MESSAGE, raw)])).decode()


def _object(link: EngineLink, path: str, timeout_s: float) -> dict[str, Any]:
    reply = link.plain("GET", path, timeout_s=timeout_s)
    if not isinstance(reply, dict):
        raise EngineSyncError(link.url, "bad_reply", f"GET {path} answered no object")
    return reply

"""Updates of the embedded engine, which reports its table, knows sessions and becomes dirty by itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from miles.sync.engine_link import EngineLink
from miles.sync.entry import SourceSpec
from miles.sync.errors import EngineSyncError
from miles.sync.membership import LiveEngine, read_engine, status_of
from miles.sync.updaters import Message, Update
from miles.weight_wire.bucket import SCHEMA, BucketHeader


class EmbeddedUpdater:
    """Keeps nothing between calls."""

    def read(self, link: EngineLink, offered: Mapping[str, SourceSpec], *, timeout_s: float) -> LiveEngine:
        return read_engine(link, timeout_s=timeout_s)

    def begin(self, link: EngineLink, engine: LiveEngine, update: Update) -> str:
        """A busy engine is asked again until its old session must be over."""
        plan, config = update.plan, update.config
        body = {
            "schema": SCHEMA,
            "run_id": plan.run_id,
            "weight_version": str(update.version),
            "selector": plan.selectors[engine.table.layout_key],
            "plan_digest": plan.digest,
            "table_digest": engine.table.table_digest,
            "engine_epoch": engine.epoch,
            "pause": config.pause,
            # Longer than we ever wait for another engine: its failure must not cost this one its session.
            "timeout_s": 2 * update.bounded(config.bucket_bytes),
        }
        deadline = time.monotonic() + 3 * update.bounded(config.bucket_bytes)
        while True:
            try:
                return str(link.post("/begin_weight_update", body, timeout_s=update.bounded())["session"])
            except EngineSyncError as error:
                wait_s = min(error.retry_after_s or 0.0, 1.0) + 0.02
                if error.code != "busy" or time.monotonic() + wait_s > deadline:
                    raise
                time.sleep(wait_s)

    def bucket(
        self, link: EngineLink, engine: LiveEngine, update: Update, token: str, header: BucketHeader, message: Message
    ) -> None:
        route, fields = message
        body = {**_fields(engine, update, token), **fields, "bucket": header.to_wire(), "flush_cache": False}
        check_ack(link.url, header, link.post(route, body, timeout_s=update.bounded(header.nbytes)))

    def folder(
        self, link: EngineLink, engine: LiveEngine, update: Update, token: str, nbytes: int, message: Message
    ) -> None:
        route, fields = message
        body = {**_fields(engine, update, token), **fields, "flush_cache": False}
        link.post(route, body, timeout_s=update.bounded(nbytes))

    def end(self, link: EngineLink, engine: LiveEngine, update: Update, token: str, buckets: int) -> None:
        body = {**_fields(engine, update, token), "buckets": buckets}
        status = status_of(link.post("/end_weight_update", body, timeout_s=update.bounded()))
        expected = {
            "state": "serving",
            "run_id": update.plan.run_id,
            "weight_version": str(update.version),
            "plan_digest": update.plan.digest,
            "engine_epoch": engine.epoch,
        }
        found = {key: status.get(key) for key in expected}
        if found != expected:
            raise EngineSyncError(link.url, "read_back", f"reports {found} after the update, expected {expected}")

    def abort(self, link: EngineLink, update: Update, token: str, reason: str) -> None:
        """Dirty now instead of at its timeout."""
        link.post("/abort_weight_update", {"session": token, "reason": reason[:500]}, timeout_s=update.bounded())

    def close(self) -> None:
        """Nothing is held."""


def _fields(engine: LiveEngine, update: Update, token: str) -> dict[str, Any]:
    return {
        "session": token,
        "plan_digest": update.plan.digest,
        "selector": update.plan.selectors[engine.table.layout_key],
        "weight_version": str(update.version),
    }


def check_ack(url: str, header: BucketHeader, reply: Mapping[str, Any]) -> None:
    """An engine names the bucket that it took, and the digest it found."""
    expected = None if header.digest is None else f"{header.digest:#x}"
    if (reply.get("sequence"), reply.get("digest")) != (header.sequence, expected):
        raise EngineSyncError(
            url, "bad_ack", f"bucket {header.sequence} digest {expected}: acknowledged as {reply.get('sequence')}, "
            f"{reply.get('digest')}"
        )  # fmt: skip

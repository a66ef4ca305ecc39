"""The bodies of the weight routes as typed records. A field out of bounds is a `BadRequest` before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.rollout.engines.embedded.fields import Fields
from miles.rollout.engines.embedded.weight_group import BACKENDS
from miles.rollout.engines.embedded.weight_state import BeginUpdate
from miles.weight_wire.bucket import SCHEMA

PAUSE_MODES = ("retract", "abort", "in_place")
# A day: longer than any wait of a sender; an update or a wait ends earlier when its client leaves.
MAX_TIMEOUT_S = 86400.0
MIN_TIMEOUT_S = 1e-3
MAX_MODULES = 256
MAX_CHAIN = 1024
MAX_COUNT = 1 << 31
PATH = 4096
DIGEST = 128


@dataclass(frozen=True, slots=True)
class InSession:
    """What every message of an update carries."""

    token: str
    plan_digest: str
    selector: str | tuple[str, ...]
    version: int


@dataclass(frozen=True, slots=True)
class BucketMessage:
    """`bucket` and `handle` are checked by their own readers, once the session is known."""

    session: InSession
    bucket: dict[str, Any]
    handle: dict[str, Any] | None
    group_name: str | None


@dataclass(frozen=True, slots=True)
class DiskMessage:
    """`deltas`: (file, base version, version) in order; empty for a whole folder."""

    session: InSession
    path: Path
    base: int | None
    deltas: tuple[tuple[Path, int, int], ...]


@dataclass(frozen=True, slots=True)
class GroupMessage:
    name: str
    address: str
    port: int
    rank: int
    size: int
    backend: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class EndMessage:
    session: InSession
    buckets: int


def read_begin(fields: Fields) -> BeginUpdate:
    if fields.integer("schema", 0, MAX_COUNT) != SCHEMA:
        raise fields.bad("schema", f"this engine reads schema {SCHEMA}")
    begin = BeginUpdate(
        run_id=fields.text("run_id"),
        version=fields.version("weight_version"),
        selector=_selector(fields),
        plan_digest=fields.text("plan_digest", most=DIGEST),
        table_digest=fields.text("table_digest", most=DIGEST),
        engine_epoch=fields.text("engine_epoch"),
        pause=fields.choice("pause", PAUSE_MODES),
        timeout_s=float(fields.number("timeout_s", MIN_TIMEOUT_S, MAX_TIMEOUT_S)),
    )
    fields.done()
    return begin


def read_tensor(fields: Fields) -> BucketMessage:
    fields.choice("load_format", ("miles_bucket",))
    message = BucketMessage(_session(fields), fields.object("bucket"), fields.object("handle"), None)
    fields.done()
    return message


def read_distributed(fields: Fields) -> BucketMessage:
    message = BucketMessage(_session(fields), fields.object("bucket"), None, fields.text("group_name"))
    fields.done()
    return message


def read_disk(fields: Fields) -> DiskMessage:
    session = _session(fields)
    path = _path(fields, "model_path", fields.text("model_path", most=PATH))
    if fields.choice("load_format", ("safetensors", "miles_delta")) == "safetensors":
        message = DiskMessage(session, path, None, ())
    else:
        links = fields.items("deltas", most=MAX_CHAIN)
        if not links:
            raise fields.bad("deltas", "a chain has one link at least")
        base = fields.version("base_version")
        message = DiskMessage(session, path, base, tuple(_link(fields, i, link) for i, link in enumerate(links)))
    fields.done()
    return message


def read_group(fields: Fields) -> GroupMessage:
    size = fields.integer("world_size", 2, 1 << 16)
    message = GroupMessage(
        name=fields.text("group_name"),
        address=fields.text("master_address"),
        port=fields.integer("master_port", 1, 65535),
        rank=fields.integer("rank_offset", 1, size - 1),
        size=size,
        backend=fields.choice("backend", BACKENDS),
        timeout_s=float(fields.number("timeout_s", MIN_TIMEOUT_S, MAX_TIMEOUT_S)),
    )
    fields.done()
    return message


def read_group_name(fields: Fields) -> str:
    name = fields.text("group_name")
    fields.done()
    return name


def read_end(fields: Fields) -> EndMessage:
    message = EndMessage(_session(fields, flush=False), fields.integer("buckets", 0, MAX_COUNT))
    fields.done()
    return message


def read_abort(fields: Fields) -> tuple[str, str]:
    """(session, reason)."""
    session, reason = fields.text("session"), fields.text("reason", "no reason given", most=2000)
    fields.done()
    return session, reason


def _session(fields: Fields, *, flush: bool = True) -> InSession:
    if flush and fields.flag("flush_cache", False):
        # All caches are flushed once, at the end of the update.
        raise fields.bad("flush_cache", "only false is offered; end_weight_update flushes")
    return InSession(
        token=fields.text("session"),
        plan_digest=fields.text("plan_digest", most=DIGEST),
        selector=_selector(fields),
        version=fields.version("weight_version"),
    )


def _selector(fields: Fields) -> str | tuple[str, ...]:
    if isinstance(fields.take("selector"), str):
        return fields.choice("selector", ("all",))
    return fields.texts("selector", most=MAX_MODULES)


def _link(fields: Fields, index: int, link: Any) -> tuple[Path, int, int]:
    name = f"deltas[{index}]"
    if not isinstance(link, list) or len(link) != 3:
        raise fields.bad(name, "not [path, base version, version]")
    inner = Fields(dict(zip(("path", "base", "version"), link, strict=True)), name)
    return _path(inner, "path", inner.text("path", most=PATH)), inner.version("base"), inner.version("version")


def _path(fields: Fields, name: str, text: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise fields.bad(name, "not an absolute path")
    return path

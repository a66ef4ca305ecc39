"""Takes buckets inside a foreign server (SGLang), whose model class knows how to load Hugging Face names.

The server calls `load(model, [(MESSAGE, tensor)])` once a message; the tensor's bytes are JSON:

| kind | fields | what happens |
|---|---|---|
| bucket | plan_digest, bucket (header), handle, reply | digest checked, pieces loaded, what each parameter took is counted |
| finish | plan_digest, buckets, reply | every element of every parameter must have come; buffers are unmapped |

Nothing is raised: an exception would end the server without a word. The answer is written into the sender's `reply`
memory, length first: {"sequence", "digest"} for a bucket, {"buckets", "parameters"} at the end, or {"error"}, after
which nothing is taken until a bucket with sequence 0 begins again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from miles.weight_wire.bucket import BucketHeader, WeightWireError, digest, piece_view
from miles.weight_wire.shared_buffer import AttachedBuffers

MESSAGE = "miles_weights"
LENGTH_BYTES = 4
REPLY_BYTES = 1 << 16


class ServedModel(Protocol):
    """A model class of the server."""

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]: ...
    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> Any: ...


@dataclass
class _Update:
    """One update under way: how many elements each parameter took, and the buckets so far."""

    plan_digest: str
    buckets: int = 0
    taken: dict[str, int] = field(default_factory=dict)
    failed: str | None = None


_updates: dict[int, _Update] = {}
_buffers = AttachedBuffers()


def load(model: ServedModel, named: list[tuple[str, torch.Tensor]]) -> None:
    """What the server calls for one message."""
    message = json.loads(bytes(named[0][1].cpu().tolist()))
    try:
        reply = _handle(model, message)
    except Exception as error:
        update = _updates.get(id(model))
        if update is not None:
            update.failed = update.failed or f"{type(error).__name__}: {error}"
        reply = {"error": f"{type(error).__name__}: {error}"[:4000]}
    write_reply(_buffers.open(message["reply"]), reply)
    if message["kind"] == "finish":
        _buffers.close()


def write_reply(memory: torch.Tensor, reply: dict[str, Any]) -> None:
    """Length (little-endian), then JSON."""
    text = json.dumps(reply).encode()
    raw = len(text).to_bytes(LENGTH_BYTES, "little") + text
    memory[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def read_reply(memory: torch.Tensor) -> dict[str, Any]:
    """What `write_reply` wrote; `WeightWireError` for memory that nobody wrote into."""
    length = int.from_bytes(bytes(memory[:LENGTH_BYTES].tolist()), "little")
    if not 0 < length <= memory.numel() - LENGTH_BYTES:
        raise WeightWireError("the server's weight loader left no answer")
    value = json.loads(bytes(memory[LENGTH_BYTES : LENGTH_BYTES + length].tolist()))
    if not isinstance(value, dict):
        raise WeightWireError("the server's weight loader answered no object")
    return value


def _handle(model: ServedModel, message: dict[str, Any]) -> dict[str, Any]:
    if message["kind"] == "finish":
        update = _updates.pop(id(model), None)
        return _finish(model, update, message)
    header = BucketHeader.from_wire(message["bucket"])
    if header.sequence == 0:
        _updates[id(model)] = _Update(message["plan_digest"])
    update = _updates.get(id(model))
    _check(update, message)
    assert update is not None
    if header.sequence != update.buckets:
        raise WeightWireError(f"bucket {header.sequence} came where {update.buckets} was due")
    buffer = _buffers.open(message["handle"])
    if header.nbytes > buffer.numel():
        raise WeightWireError(f"bucket of {header.nbytes} bytes in memory of {buffer.numel()}")
    found = digest(buffer[: header.nbytes]) if header.digest is not None else None
    if found != header.digest:
        raise WeightWireError(f"bucket {header.sequence}: digest {found:#x}, announced was {header.digest:#x}")
    whole = [piece.name for piece in header.pieces if piece.slot is not None or piece.scale != "none"]
    if whole:
        raise WeightWireError(f"{whole[0]}: this server takes whole, unquantised arrays only")
    pieces = [(piece.name, piece_view(buffer, piece)) for piece in header.pieces]
    with torch.no_grad():
        _load_counted(model, pieces, update.taken)
    update.buckets += 1
    return {"sequence": header.sequence, "digest": None if found is None else f"{found:#x}"}


def _finish(model: ServedModel, update: _Update | None, message: dict[str, Any]) -> dict[str, Any]:
    _check(update, message)
    assert update is not None
    if update.buckets != message["buckets"]:
        raise WeightWireError(f"{update.buckets} buckets came, {message['buckets']} were sent")
    parameters = _parameters(model)
    wrong = [
        f"{name} {update.taken.get(name, 0)} of {_elements(parameter)}"
        for name, parameter in parameters.items()
        if update.taken.get(name, 0) != _elements(parameter)
    ]
    if wrong:
        raise WeightWireError(
            f"{len(wrong)} parameters were not filled exactly once (elements): {', '.join(wrong[:10])}"
        )
    return {"buckets": update.buckets, "parameters": len(parameters)}


def _check(update: _Update | None, message: dict[str, Any]) -> None:
    if update is None:
        raise WeightWireError("no update is under way; it begins with bucket 0")
    if update.failed is not None:
        raise WeightWireError(f"this update failed: {update.failed}")
    if update.plan_digest != message["plan_digest"]:
        raise WeightWireError("the message is of another plan than the update that is under way")


def _parameters(model: ServedModel) -> dict[str, torch.nn.Parameter]:
    return dict(model.named_parameters())


def _elements(parameter: torch.nn.Parameter) -> int:
    """How many elements of a parameter come from a checkpoint: an embedding's rows beyond the vocabulary do not."""
    owner = getattr(getattr(parameter, "weight_loader", None), "__self__", None)
    rows = getattr(owner, "org_vocab_size", None)
    return parameter.numel() if rows is None else rows * (parameter.numel() // parameter.shape[0])


def _load_counted(model: ServedModel, pieces: list[tuple[str, torch.Tensor]], taken: dict[str, int]) -> None:
    """`model.load_weights`, one name at a time, with every parameter's own loader counted.

    Model classes skip names that they do not know: a name that no parameter's loader was called for is an error.
    """
    loaders: list[tuple[torch.nn.Parameter, Any]] = []
    for name, parameter in _parameters(model).items():
        original = parameter.__dict__.get("weight_loader")
        loaders.append((parameter, original))
        parameter.weight_loader = _counted(name, original, taken)  # type: ignore[attr-defined]
    try:
        for name, tensor in pieces:
            before = sum(taken.values())
            model.load_weights([(name, tensor)])
            if sum(taken.values()) == before:
                raise WeightWireError(f"{name} has no destination in the server's model")
    finally:
        for parameter, original in loaders:
            if original is None:
                del parameter.__dict__["weight_loader"]
            else:
                parameter.weight_loader = original  # type: ignore[attr-defined]


def _counted(name: str, original: Callable[..., Any] | None, taken: dict[str, int]) -> Callable[..., Any]:
    def loader(parameter: torch.nn.Parameter, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        taken[name] = taken.get(name, 0) + weight.numel()
        if original is not None:
            return original(parameter, weight, *args, **kwargs)
        if parameter.shape != weight.shape:
            raise WeightWireError(f"{name} {list(parameter.shape)} was offered {list(weight.shape)}")
        parameter.data.copy_(weight)
        return None

    return loader

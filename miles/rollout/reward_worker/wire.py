"""Frames between driver and worker: four bytes of length, then the message. Requests are pickles, replies are JSON.

The driver never unpickles: what a worker says is data, whatever ran in it. A reply repeats the request's nonce.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

HEADER = struct.Struct(">I")
MAX_REPLY = 1 << 20
# Standard output and error of a worker, for one call.
MAX_OUTPUT = 1 << 18


@dataclass(frozen=True)
class Request:
    """One call: text of the answer, the prompt's answer and metadata; `seed_text` seeds `random` for this call."""

    nonce: str
    completion: str
    answer: str
    metadata: dict[str, Any]
    seed_text: str


def request_frame(request: Request) -> bytes:
    body = pickle.dumps(
        (request.nonce, request.completion, request.answer, request.metadata, request.seed_text), protocol=5
    )
    return HEADER.pack(len(body)) + body


def reply_frame(reply: dict[str, Any]) -> bytes:
    body = json.dumps(reply).encode()
    return HEADER.pack(len(body)) + body


def read_exactly(channel: socket.socket, size: int) -> bytes | None:
    """Blocking; None at the end of the stream."""
    parts, left = [], size
    while left:
        part = channel.recv(min(left, 1 << 20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_request(channel: socket.socket) -> Request | None:
    header = read_exactly(channel, HEADER.size)
    body = None if header is None else read_exactly(channel, HEADER.unpack(header)[0])
    return None if body is None else Request(*pickle.loads(body))

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
MAX_REQUEST = 1 << 30
FIRST_READ = 1 << 16
# Standard output and error of a worker, for one call.
MAX_OUTPUT = 1 << 18


@dataclass(frozen=True)
class Request:
    """One call: text of the answer, the prompt's answer and metadata; `seed_text` seeds `random` for this call."""

    nonce: str
    completion: str
    answer: Any
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


class NoFrame(Exception):
    """Bytes that are no message of ours."""


class Incoming:
    """Bytes of one frame as they come; one frame is on its way at a time, so most take one read."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()

    @property
    def missing(self) -> int:
        """How many bytes to read next; 0 when the frame is whole. `NoFrame` above the limit, or for bytes too many."""
        if len(self._data) < HEADER.size:
            return FIRST_READ
        size = HEADER.unpack_from(self._data)[0]
        if size > self._limit or len(self._data) > HEADER.size + size:
            raise NoFrame
        return HEADER.size + size - len(self._data)

    def add(self, part: bytes) -> None:
        """`EOFError` at the end of the stream."""
        if not part:
            raise EOFError
        self._data += part

    @property
    def body(self) -> bytes:
        return bytes(self._data[HEADER.size :])


def read_request(channel: socket.socket) -> Request | None:
    """Blocking; None when the driver has closed the channel."""
    frame = Incoming(MAX_REQUEST)
    try:
        while missing := frame.missing:
            frame.add(channel.recv(missing))
    except (EOFError, NoFrame):
        return None
    return Request(*pickle.loads(frame.body))

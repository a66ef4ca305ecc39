"""The loop of one worker: read a request, call the function, reply. It ends when the driver closes the channel."""

from __future__ import annotations

import faulthandler
import io
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from miles.rollout.reward_worker import linux
from miles.rollout.reward_worker.values import reward_and_parts
from miles.rollout.reward_worker.wire import MAX_OUTPUT, Request, read_request, reply_frame

MAX_TRACEBACK = 4000
_exit = os._exit
# Frames of these files are ours, not the function's.
_OWN_FOLDER = os.path.dirname(__file__)


def serve(
    channel: socket.socket, output: int, function: Callable[..., Any] | str, spec: dict[str, Any], *, parent: int
) -> NoReturn:
    """`function` as text is the reason why there is none."""
    os.setsid()
    linux.die_with_parent(signal.SIGKILL, parent)
    _redirect(output)
    linux.limit_memory(int(spec["memory_gib"] * 2**30))
    pid = os.getpid()
    if isinstance(function, str):
        channel.sendall(reply_frame({"pid": pid, "error": function}))
        _exit(0)
    channel.sendall(reply_frame({"pid": pid}))
    while (request := read_request(channel)) is not None:
        os.lseek(1, 0, os.SEEK_SET)
        if spec["processor_time_s"] is not None:
            linux.limit_processor_time(spec["processor_time_s"])
        reply = _call(function, request)
        if os.getpid() != pid:
            # The function forked, and this is its copy.
            _exit(0)
        written = os.lseek(1, 0, os.SEEK_CUR)
        if written >= MAX_OUTPUT and "error" not in reply:
            reply = _failure("OutputError", f"wrote more than {MAX_OUTPUT // 1024} KiB to its standard output", [])
        channel.sendall(reply_frame({"nonce": request.nonce, "retire": written >= MAX_OUTPUT, **reply}))
    _exit(0)


def _redirect(output: int) -> None:
    """Standard output and error go to the bounded file, which the driver reads when this process dies."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # Written through, so that a line too much fails in the function's own line.
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for the life of the process
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    os._exit = _exit_with_place


def _exit_with_place(status: int) -> NoReturn:
    faulthandler.dump_traceback(file=2, all_threads=False)
    _exit(status)


def _call(function: Callable[..., Any], request: Request) -> dict[str, Any]:
    # The same sample gets the same random numbers, whichever worker judges it.
    random.seed(request.seed_text)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
    try:
        total, parts = reward_and_parts(function(request.completion, request.answer, request.metadata))
        return {"reward": total, "parts": parts}
    except BaseException as error:  # `sys.exit` and Ctrl-C of the function's own are failures of it
        frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename) != _OWN_FOLDER]
        if os.lseek(1, 0, os.SEEK_CUR) >= MAX_OUTPUT - 1 and isinstance(error, PermissionError):
            message = f"wrote more than {MAX_OUTPUT // 1024} KiB to its standard output"
            return _failure("OutputError", message, frames)
        return _failure(type(error).__name__, str(error), frames)


def _failure(kind: str, message: str, frames: list[traceback.FrameSummary]) -> dict[str, Any]:
    place = f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else None
    shown = "".join(traceback.format_list(frames[-20:]))[-MAX_TRACEBACK:]
    return {"error": {"kind": kind, "message": message[:1000], "place": place, "traceback": shown}}

"""`WorkerProcesses`: calls of one function in processes that are made once, reused, killed when late, and replaced.

The fork server starts beside whatever the driver does; the first call waits for it. Descriptors of a worker are made
here: nothing but its reply frame, with the nonce of the call, gives a verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.rollout.reward_worker import fork_server, linux
from miles.rollout.reward_worker.wire import MAX_OUTPUT, MAX_REPLY, Incoming, NoFrame, Request, request_frame
from miles.rollout.rewards.failures import WorkerFailure, place_in_output, without_own_frames
from miles.rollout.rewards.function import WorkerCall

# Until a worker says that it is there: the first import of the function's module on a busy machine.
START_TIMEOUT_S = 120.0
# A killed worker closes its socket in milliseconds, unless the kernel is very busy.
KILL_WAIT_S = 5.0
CLOSE_WAIT_S = 2.0
MAX_TAIL = 2000


@dataclass(eq=False)
class _Worker:
    pid: int
    channel: socket.socket
    output: int

    def said(self) -> str:
        """What the last call wrote to its standard output and error."""
        written = min(os.lseek(self.output, 0, os.SEEK_CUR), MAX_OUTPUT)
        return os.pread(self.output, written, 0).decode(errors="replace")

    def close(self) -> None:
        self.channel.close()
        os.close(self.output)


def _no_reply() -> WorkerFailure:
    return WorkerFailure(
        "ReplyError", "the worker answered what nobody asked; does the function write to its descriptors?"
    )


class WorkerProcesses:
    """`start`, then `call` from one event loop, then `close`."""

    def __init__(self, call: WorkerCall, *, memory_gib: float) -> None:
        self._call = call
        self._memory_gib = memory_gib
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._server_output = -1
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self.started = 0  # workers, replacements included

    def start(self) -> None:
        """Start the fork server and return at once. Called again, it replaces a server that died."""
        if self._server is not None and self._server.poll() is None:
            return
        self._end_server()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server_output = linux.bounded_output(MAX_OUTPUT)
        spec = {
            "driver": os.getpid(),
            "path": [str(Path(entry).resolve()) for entry in sys.path],
            "make": self._call.make,
            "arguments": self._call.arguments,
            "memory_gib": self._memory_gib,
            "processor_time_s": self._call.timeout_s if self._call.computes else None,
        }
        with theirs, tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(spec).encode())
            stdin.flush()
            self._server = subprocess.Popen(
                [sys.executable, "-I", fork_server.__file__, str(theirs.fileno())],
                stdin=stdin,
                stdout=self._server_output,
                stderr=self._server_output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._control = ours

    async def call(
        self, *, completion: str, answer: Any, metadata: dict[str, Any], seed_text: str, timeout_s: float
    ) -> tuple[float, dict[str, float]]:
        """(reward, parts). `WorkerFailure` when the function fails, dies, says nonsense or takes too long."""
        request = Request(secrets.token_hex(16), completion, answer, metadata, seed_text)
        frame = request_frame(request)
        worker = self._idle.pop() if self._idle else await self._new_worker()
        self._busy.add(worker)
        reusable = False
        try:
            # The clock starts here: the worker is there and waits for nothing but this request.
            async with asyncio.timeout(timeout_s) as clock:
                reply = await self._exchange(worker, frame)
            reusable = reply.get("nonce") == request.nonce and not reply.get("retire", True)
            return self._verdict(reply, request)
        except TimeoutError:
            if not clock.expired():
                raise
            await self._kill(worker, dump=True)
            said = worker.said()
            message = f"no reward within rollout.reward.timeout_s={timeout_s:g}"
            raise WorkerFailure(
                "TimeoutError", message, place=place_in_output(said), detail=without_own_frames(said)[-MAX_TAIL:]
            ) from None
        except NoFrame:
            raise _no_reply() from None
        except (EOFError, OSError):
            raise await self._death(worker) from None
        finally:
            self._busy.discard(worker)
            if reusable:
                self._idle.append(worker)
            else:
                self._order(do="kill", pid=worker.pid, dump=False)
                worker.close()

    def close(self) -> None:
        """End every process, hanging ones too; returns within seconds whatever they do."""
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        for worker in self._busy:
            # Its call closes the rest.
            worker.channel.close()
        self._end_server()

    async def _new_worker(self) -> _Worker:
        self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        output = linux.bounded_output(MAX_OUTPUT)
        worker = _Worker(0, ours, output)
        try:
            with theirs:
                socket.send_fds(self._control, [json.dumps({"do": "fork"}).encode()], [theirs.fileno(), output])
            async with asyncio.timeout(START_TIMEOUT_S):
                hello = await self._read(worker)
            if "error" in hello:
                raise WorkerFailure("the worker cannot start", hello["error"], detail=self._server_said())
            worker.pid = hello["pid"]
        except TimeoutError:
            worker.close()
            said = self._server_said()
            self._end_server()
            message = f"no worker within {START_TIMEOUT_S:g} s"
            raise WorkerFailure("the worker cannot start", message, detail=said) from None
        except (EOFError, NoFrame, OSError):
            said = f"{self._server_said()}{worker.said()}"
            worker.close()
            raise WorkerFailure(
                "the worker cannot start", "its process ended", place=place_in_output(said), detail=said
            ) from None
        except BaseException:
            worker.close()
            raise
        self.started += 1
        return worker

    async def _exchange(self, worker: _Worker, frame: bytes) -> dict[str, Any]:
        await asyncio.get_running_loop().sock_sendall(worker.channel, frame)
        return await self._read(worker)

    async def _read(self, worker: _Worker) -> dict[str, Any]:
        """One reply; `EOFError` at the end of the stream, `NoFrame` for anything that is no reply."""
        loop, frame = asyncio.get_running_loop(), Incoming(MAX_REPLY)
        while missing := frame.missing:
            frame.add(await loop.sock_recv(worker.channel, missing))
        try:
            reply = json.loads(frame.body)
        except (ValueError, RecursionError):
            raise NoFrame from None
        if not isinstance(reply, dict):
            raise NoFrame
        return reply

    @staticmethod
    def _verdict(reply: dict[str, Any], request: Request) -> tuple[float, dict[str, float]]:
        if reply.get("nonce") != request.nonce:
            raise _no_reply()
        error = reply.get("error")
        if error is not None:
            raise WorkerFailure(error["kind"], error["message"], place=error["place"], detail=error["traceback"])
        return reply["reward"], reply["parts"]

    async def _kill(self, worker: _Worker, *, dump: bool) -> None:
        """Have the server end the worker, and wait until its socket is closed."""
        self._order(do="kill", pid=worker.pid, dump=dump)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(KILL_WAIT_S):
                while await asyncio.get_running_loop().sock_recv(worker.channel, 4096):
                    pass

    async def _death(self, worker: _Worker) -> WorkerFailure:
        await self._kill(worker, dump=False)
        said = worker.said()
        lines = [line for line in said.splitlines() if line.startswith("Fatal Python error")]
        how = lines[0] if lines else "it ended itself (os._exit), or the kernel did (memory, processor time)"
        message = f"the worker process died: {how}"
        return WorkerFailure(
            "WorkerDied", message, place=place_in_output(said), detail=without_own_frames(said)[-MAX_TAIL:]
        )

    def _order(self, **order: Any) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(json.dumps(order).encode())

    def _server_said(self) -> str:
        written = min(os.lseek(self._server_output, 0, os.SEEK_CUR), MAX_OUTPUT)
        return os.pread(self._server_output, written, 0).decode(errors="replace")[-MAX_TAIL:]

    def _end_server(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            try:
                self._server.wait(CLOSE_WAIT_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None
        if self._server_output >= 0:
            os.close(self._server_output)
            self._server_output = -1

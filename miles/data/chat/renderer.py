"""`ChatRenderer`: conversations to text by one chat template, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from miles.config import ConfigError
from miles.config.json_text import parse_json
from miles.data.chat import render_process
from miles.data.chat.conversation import Conversation
from miles.data.chat.template import ChatTemplate

# Of one prompt. The clock on the wall is the wider one: a busy machine is no fault of a template.
PROCESSOR_TIME_S = 10
WALL_TIME_S = 120.0
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 8 << 20
# JSON writes a character in at most twelve bytes.
_MAX_REPLY_BYTES = 12 * MAX_CHARACTERS + 4096
_CLOSE_WAIT_S = 5.0


class ChatRenderer:
    """`render` starts the process when it is first called; `close` ends it. Usable in a `with` statement."""

    def __init__(
        self, template: ChatTemplate, *, processor_time_s: int = PROCESSOR_TIME_S, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self.template = template
        self._limits = {"processor_time_s": processor_time_s, "memory_bytes": memory_bytes}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ChatRenderer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def render(self, conversation: Conversation, *, place: str) -> str:
        """The prompt's text, generation prompt included. `ConfigError` begins with `place` and names the Jinja line."""
        return self._reply(conversation, place)["text"]

    def render_answered(self, conversation: Conversation, *, place: str) -> tuple[str, list[tuple[int, int]]]:
        """The text of an answered conversation, and [start, end) of the characters that its assistants wrote.

        These are the template's `{% generation %}` blocks; without such, what it adds for an assistant's message.
        """
        reply = self._reply(conversation, place, answered=True)
        answers = [(start, end) for start, end in reply["answers"] if start < end]
        if not answers:
            raise ConfigError(f"{place}: {self.template.where}: it writes nothing of the assistants; mend the template")
        return reply["text"], answers

    def _reply(self, conversation: Conversation, place: str, *, answered: bool = False) -> dict[str, Any]:
        process = self._started()
        request = {"messages": conversation.messages, "tools": conversation.tools, "answered": answered}
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            reply = parse_json(self._line(process))
        except (BrokenPipeError, EOFError, TimeoutError, ValueError) as error:
            raise ConfigError(f"{place}: {self.template.where}: {self._end(error)}; mend the template") from None
        if "text" in reply:
            return reply
        line = f"line {reply['line']}: " if reply.get("line") else ""
        fix = "mend the template, or the row that it refuses"
        if reply.get("clock"):
            fix = (
                "a resumed run would have other prompts; give the date by data.chat_template_kwargs (often date_string)"
            )
        raise ConfigError(f"{place}: {self.template.where}: {line}{reply['error']}; {fix}")

    def close(self) -> None:
        """Nothing is left of the process."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            process.wait(_CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OPENBLAS_NUM_THREADS": "1"}
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "HOME") if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", render_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**kept, **quiet},
            start_new_session=True,
        )
        setup = {
            "path": [str(Path(entry).resolve()) for entry in sys.path],
            "template": self.template.source,
            "with_tools": self.template.with_tools,
            "variables": dict(self.template.variables),
            "max_characters": MAX_CHARACTERS,
            **self._limits,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(setup).encode() + b"\n")
        return self._process

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        """The next reply. `EOFError` when the process ended, `TimeoutError` when it does not answer."""
        assert process.stdout is not None
        deadline = time.monotonic() + WALL_TIME_S
        parts: list[bytes] = []
        size = 0
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while not parts or not parts[-1].endswith(b"\n"):
                if not ready.select(max(deadline - time.monotonic(), 0)):
                    raise TimeoutError
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    raise EOFError
                parts.append(part)
                size += len(part)
                if size > _MAX_REPLY_BYTES:
                    raise ValueError("a reply without end")
        return b"".join(parts)

    def _end(self, error: Exception) -> str:
        """Why the process gave no reply; it is gone afterwards."""
        process = self._process
        assert process is not None
        if isinstance(error, TimeoutError | ValueError):
            process.kill()
        process.wait()
        self.close()
        if isinstance(error, TimeoutError):
            return f"no prompt within {WALL_TIME_S:g} s"
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"more than {self._limits['processor_time_s']} s of processor time for one prompt"
        return f"its process ended with code {process.returncode}"

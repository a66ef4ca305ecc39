"""Ask the probe program, with a time limit: the only way the rest of the harness talks to a GPU driver."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_ANSWER_BYTES = 1 << 20
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
_BOOT = f"import sys; sys.path.insert(0, {_PACKAGE_PARENT!r}); from miles_ci.run.devices.probe import main; main()"


def ask(
    what: str, backend: str, *extra: str, limit_s: float = 60.0, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The probe's answer: `{"ok": bool, …}`. Never raises and never waits longer than `limit_s` (plus the kill)."""
    command = [sys.executable, "-S", "-E", "-c", _BOOT, what, backend, *extra]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=dict(os.environ if environ is None else environ),
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process stuck inside the driver may ignore even SIGKILL for a while: do not wait for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
        return {"ok": False, "code": -4, "error": f"no answer from the driver within {limit_s:g} s"}
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError:
        detail = errors.decode(errors="replace").strip().splitlines()[-1:] or [f"exit {process.returncode}"]
        return {"ok": False, "code": -5, "error": f"the probe died: {detail[0]}"}
    return answer


def ask_command(
    command: Sequence[str], *, cwd: Path, limit_s: float = 60.0, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON object that a command of the project prints, or `{"ok": False, "error": ...}`. Never raises."""
    try:
        process = subprocess.Popen(
            list(command),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ if environ is None else environ),
            start_new_session=True,
        )
    except OSError as error:
        return {"ok": False, "error": f"{command[0]} cannot be started: {error.strerror or error}"}
    try:
        output = _bounded(process, time.monotonic() + limit_s)
    except _NoAnswer as error:
        return {"ok": False, "error": str(error).format(limit=limit_s)}
    finally:
        # Whatever it started goes with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        if process.stdout is not None:
            process.stdout.close()
    if process.returncode != 0:
        return {"ok": False, "error": f"exit code {process.returncode}"}
    try:
        answer = json.loads(output)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        return {"ok": False, "error": f"it printed no JSON object: {output[:80]!r}"}
    return answer


class _NoAnswer(Exception):
    pass


def _bounded(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """All that the process prints until it ends."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    output = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise _NoAnswer("no answer within {limit:g} s")
        if select.select([process.stdout], [], [], min(left, 0.5))[0]:
            piece = os.read(process.stdout.fileno(), 1 << 16)
            output += piece
            if len(output) > MAX_ANSWER_BYTES:
                raise _NoAnswer(f"more than {MAX_ANSWER_BYTES} bytes printed")
            if not piece and process.poll() is not None:
                return output
            if not piece:
                time.sleep(0.01)


def visible_count(backend: str, *, environ: Mapping[str, str] | None = None) -> int:
    """Devices that a program started with this environment sees; -1 when the driver cannot say."""
    answer = ask("count", backend, environ=environ)
    return int(answer["count"]) if answer["ok"] else -1

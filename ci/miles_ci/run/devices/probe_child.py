"""Ask the probe program, with a time limit: the only way the rest of the harness talks to a GPU driver."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def visible_count(backend: str, *, environ: Mapping[str, str] | None = None) -> int:
    """Devices that a program started with this environment sees; -1 when the driver cannot say."""
    answer = ask("count", backend, environ=environ)
    return int(answer["count"]) if answer["ok"] else -1

"""What went wrong in one reward, and the error that says so: sample, function, place, traceback, completion."""

from __future__ import annotations

import os
import re
import traceback
from dataclasses import dataclass

from miles.rollout.errors import RewardError

SHOWN_COMPLETION = 200
MAX_SHOWN = 4000
_OWN_FOLDER = os.path.dirname(__file__)
# A line of a traceback that `faulthandler` wrote: of a hang, a crash, or `os._exit`.
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]*)", line (?P<line>\d+) in (?P<name>[^\n]*)$', re.MULTILINE)


class WorkerFailure(Exception):
    """A call in a worker gave no reward. `place` is "file:line, in function" where it is known."""

    def __init__(self, kind: str, message: str, *, place: str | None = None, detail: str = "") -> None:
        super().__init__(f"{kind}: {message}")
        self.place = place
        self.detail = detail


def without_own_frames(output: str) -> str:
    """What a worker said, less the frames of its own loop."""
    return "\n".join(line for line in output.splitlines() if "/reward_worker/" not in line)


def place_in_output(output: str) -> str | None:
    """The innermost frame of the function in what `faulthandler` wrote, libraries of Python left out."""
    frames = [m for m in _FRAME.finditer(output) if "/reward_worker/" not in m["file"]]
    own = [m for m in frames if f"{os.sep}lib{os.sep}python" not in m["file"]] or frames
    return f"{own[0]['file']}:{own[0]['line']}, in {own[0]['name']}" if own else None


@dataclass(frozen=True)
class Failed:
    """One failed reward."""

    sample_id: str
    name: str
    completion: str
    error: Exception

    def raised(self) -> RewardError:
        place, detail = self._where()
        lines = [
            f"sample {self.sample_id}: reward {self.name} failed: {self._what()}"
            + (f" ({place})" if place else "")
            + "; fix the function, or set rollout.reward.on_error=mask",
            *([detail.rstrip()[-MAX_SHOWN:]] if detail.strip() else []),
            f"completion: {self.completion[:SHOWN_COMPLETION]!r}" + ("..." * (len(self.completion) > SHOWN_COMPLETION)),
        ]
        error = RewardError("\n".join(lines))
        error.__cause__ = self.error
        return error

    def _what(self) -> str:
        if isinstance(self.error, WorkerFailure):
            return str(self.error)
        return f"{type(self.error).__name__}: {self.error}"

    def _where(self) -> tuple[str | None, str]:
        if isinstance(self.error, WorkerFailure):
            return self.error.place, self.error.detail
        every = traceback.extract_tb(self.error.__traceback__)
        frames = [f for f in every if os.path.dirname(f.filename) != _OWN_FOLDER and "asyncio" not in f.filename]
        if not frames:
            return None, ""
        last = frames[-1]
        return f"{last.filename}:{last.lineno}, in {last.name}", "".join(traceback.format_list(frames[-20:]))

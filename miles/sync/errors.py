"""Errors of weight sync. Each names engine, version, bucket or parameter as far as it is known."""

from __future__ import annotations

from functools import partial
from typing import Any

from miles.config import ConfigError, MilesError


class SyncError(MilesError):
    """Root of the package's errors."""


class PlanError(SyncError):
    """Trained weights and engine tables do not fit together; lists every name."""


class SyncOptionError(SyncError, ConfigError):
    """An option or combination that weight sync does not offer; names the option, the reason, what to use."""


class SourceError(SyncError):
    """The trainer's weights differ from the plan or are not finite; names the parameter."""


class SyncBusyError(SyncError):
    """A sync is already running on this pusher."""


class EngineSyncError(SyncError):
    """One engine refused or failed a message; `code` is the engine's own or `unreachable`."""

    def __init__(self, url: str, code: str, message: str, *, retry_after_s: float | None = None):
        super().__init__(f"engine {url}: {code}: {message}")
        self.url = url
        self.code = code
        self.retry_after_s = retry_after_s
        self._given = (url, code, message)

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an error is rebuilt from its text, which is not what this one takes.
        return partial(type(self), retry_after_s=self.retry_after_s), self._given


class NoEngineLeft(SyncError):
    """Every engine failed the sync; carries what each one said."""

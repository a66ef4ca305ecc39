"""Errors of the rollout side. `EngineError` is the root of all that an engine or its answer can cause."""

from __future__ import annotations

from functools import partial
from typing import Any

from miles.config import ConfigError, MilesError


class RolloutError(MilesError):
    """Root of the package's errors."""


class EngineError(RolloutError):
    """An engine failed or answered outside the contract; names the engine."""


class EngineStartError(EngineError):
    """An engine process ended, or did not report its port in time; carries the end of its log."""


class EngineModelError(EngineStartError, ConfigError):
    """What the engine was given is wrong: a model folder that is missing, incomplete or of an unsupported kind, a
    port that is taken. Exit code 2."""


class EngineUnreachable(EngineError):
    """No reply: connection refused or lost, or the bounded wait ran out."""


class EngineHttpError(EngineError):
    """The engine refused a request: `status` and `kind` (e.g. `weights_dirty`) say why."""

    def __init__(self, message: str, *, status: int, kind: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword arguments are lost by default, and with them the error, when it crosses to another process.
        return partial(EngineHttpError, status=self.status, kind=self.kind), self.args


class EngineReplyError(EngineError):
    """A reply broke the contract (lengths, log-probs, ids, finish reason); names engine and request."""


class EngineCapabilityError(EngineError):
    """The engine's build lacks a feature that was asked for; raised before any request is sent."""


class RewardError(RolloutError):
    """A reward function failed or gave a non-finite value; names the sample."""


class RolloutStarved(RolloutError):
    """Too many groups in a row were refused by the filters; carries the counts per reason."""


class PortError(RolloutError, ConfigError):
    """No free port could be leased, or a given port is taken. Exit code 2."""

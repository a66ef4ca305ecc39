"""Errors of the quantisation package."""

from __future__ import annotations

from miles.config.errors import ConfigError, MilesError


class QuantError(MilesError):
    """Root of the package's errors."""


class QuantConfigError(QuantError, ConfigError):
    """A quantisation option, variable or checkpoint contract is wrong. Exit code 2."""


class ContractMismatch(QuantConfigError):
    """Two quantisation contracts that must agree do not."""


class QATHookMissing(QuantError):
    """A routed-expert weight was used in a step without going through fake quantisation."""

    def __str__(self) -> str:
        return f"QATHookMissing: {super().__str__()}"


class ConversionError(QuantError, ConfigError):
    """A checkpoint cannot be converted as asked: its files, the options or the target are wrong. Exit code 2."""

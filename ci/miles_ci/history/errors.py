"""Errors of the history store."""

from __future__ import annotations

from miles_ci.errors import CiError


class StoreError(CiError):
    """The store cannot be reached, read or written; the text names the address and the cause.

    Planning goes on with `tests/durations.json`; a test with a metric bound is an error, never a silent pass.
    """

    exit_code = 3


class NoSuchStore(StoreError):
    """A command that only reads was given the address of a store that is not there."""

    exit_code = 2


class MetricError(CiError):
    """A metric bound is declared wrongly, or a person asks for a promotion that cannot be done."""

    exit_code = 2

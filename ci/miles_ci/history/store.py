"""The seam between the harness and its memory: `HistoryStore`, and `open_store` that picks one by address.

Implementations: `SqliteStore` (a file, WAL) and `PostgresStore` (a server, shared by many runners). Both pass
one conformance suite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from miles_ci.history.errors import StoreError
from miles_ci.history.records import DurationRow, MetricIdentity, MetricValue


class HistoryStore(Protocol):
    """Durations and metric values of earlier runs. Every method raises `StoreError` when the store fails."""

    def record_durations(self, rows: Sequence[DurationRow]) -> int:
        """Add the rows that are not there yet, all or none; returns how many were added."""
        ...

    def passing_durations(
        self, *, hardware: str, since: float, limit: int = 20, suite: str | None = None
    ) -> Mapping[tuple[str, str], list[int]]:
        """(suite, test) -> milliseconds of its last `limit` passed attempts since `since`, newest first."""
        ...

    def outcomes(self, *, test: str, suite: str, limit: int = 20) -> list[tuple[str, str]]:
        """(run_id, outcome of its last attempt) of one test, newest run first."""
        ...

    def record_values(self, rows: Sequence[MetricValue]) -> int:
        """Add the rows that are not there yet, all or none; returns how many were added."""
        ...

    def values(self, identity: MetricIdentity, *, state: str, limit: int, position: int = 0) -> list[MetricValue]:
        """The newest `limit` values of one series in one state, newest first."""
        ...

    def promote(self, identity: MetricIdentity, *, position: int = 0, run_ids: Sequence[str] | None = None) -> int:
        """Make candidates of the series trusted, those of `run_ids` or all; returns how many changed."""
        ...

    def positions(self, identity: MetricIdentity) -> list[int]:
        """The positions of one series that hold any value, ascending."""
        ...

    def series(self) -> list[tuple[MetricIdentity, int, int]]:
        """Every series with its number of trusted values and of candidates, in a fixed order."""
        ...

    def close(self) -> None: ...


def open_store(address: str, *, create: bool = True) -> HistoryStore:
    """`postgresql://…` or `postgres://…` gives a PostgresStore, `sqlite:PATH` or a plain path a SqliteStore.

    With `create=False` (commands that only read) a file that is not there is `NoSuchStore`, and none is made.
    """
    if address.startswith(("postgresql://", "postgres://")):
        from miles_ci.history.postgres import PostgresStore

        return PostgresStore(address)
    scheme, separator, rest = address.partition("://")
    if separator:
        if scheme != "sqlite":
            raise StoreError(
                f"history store {address!r}: scheme {scheme!r} is not known; use sqlite:PATH or postgresql://…"
            )
        path = rest
    else:
        path = address.removeprefix("sqlite:")
    from miles_ci.history.sqlite import SqliteStore

    return SqliteStore(path, create=create)

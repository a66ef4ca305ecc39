"""All that both stores share: SQL, migrations, errors. Written once with `?` placeholders in the dialect both servers understand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from miles_ci.history.errors import StoreError
from miles_ci.history.records import CANDIDATE, TRUSTED, DurationRow, MetricIdentity, MetricValue

IDENTITY_COLUMNS = ("test", "backend", "suite", "hardware", "num_gpus", "metric", "steps", "spec_digest")

SCHEMA_VERSION = 1
# Entry i brings a store from version i to i + 1. An entry that was released is never edited.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE durations (
            test TEXT NOT NULL, suite TEXT NOT NULL, backend TEXT NOT NULL, hardware TEXT NOT NULL,
            num_gpus INTEGER NOT NULL, duration_ms BIGINT NOT NULL, outcome TEXT NOT NULL, run_id TEXT NOT NULL,
            recorded_at DOUBLE PRECISION NOT NULL, attempt INTEGER NOT NULL, commit_id TEXT NOT NULL,
            PRIMARY KEY (test, suite, hardware, run_id, attempt))""",
        "CREATE INDEX durations_recent ON durations (hardware, outcome, recorded_at)",
        """CREATE TABLE metric_values (
            test TEXT NOT NULL, backend TEXT NOT NULL, suite TEXT NOT NULL, hardware TEXT NOT NULL,
            num_gpus INTEGER NOT NULL, metric TEXT NOT NULL, steps TEXT NOT NULL, spec_digest TEXT NOT NULL,
            position INTEGER NOT NULL, value DOUBLE PRECISION NOT NULL, state TEXT NOT NULL, run_id TEXT NOT NULL,
            recorded_at DOUBLE PRECISION NOT NULL, commit_id TEXT NOT NULL,
            PRIMARY KEY (test, backend, suite, hardware, num_gpus, metric, steps, spec_digest, position, run_id))""",
    ),
)

_SAME_SERIES = " AND ".join(f"{name} = ?" for name in IDENTITY_COLUMNS)
_IDENTITY_LIST = ", ".join(IDENTITY_COLUMNS)


class SqlStore(ABC):
    """Everything but the connection.

    A subclass sets `_where` (the address without a password) and `_driver_error`, opens its connection, calls
    `_migrate`, and gives the abstract methods.
    """

    _where: str
    _driver_error: type[Exception]

    @abstractmethod
    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """Run one statement (`?` placeholders); the driver's own cursor. Raises `_driver_error`."""

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[Any]:
        """All or nothing, against other threads and processes too."""

    @abstractmethod
    def close(self) -> None:
        """End the connection."""

    @abstractmethod
    def _lock_schema(self) -> None:
        """Called first in the migrating transaction: two runners that meet an empty store take turns."""

    def _migrate(self) -> None:
        """Create or update the tables; the connection is closed when that fails."""
        try:
            with self._failures("create tables"), self._transaction():
                self._lock_schema()
                self._execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)")
                row = self._execute("SELECT version FROM schema_version").fetchone()
                version = row[0] if row else 0
                if version > SCHEMA_VERSION:
                    raise StoreError(
                        f"history store {self._where}: schema version {version} is newer than {SCHEMA_VERSION}, "
                        "the newest this harness knows; update the checkout"
                    )
                for step in MIGRATIONS[version:]:
                    for statement in step:
                        self._execute(statement)
                if version != SCHEMA_VERSION:
                    self._execute("DELETE FROM schema_version")
                    self._execute("INSERT INTO schema_version VALUES (?)", (SCHEMA_VERSION,))
        except BaseException:
            self.close()
            raise

    def _rows(self, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._failures("read"):
            found: list[tuple[Any, ...]] = self._execute(sql, parameters).fetchall()
            return found

    def _write(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> int:
        """One transaction; returns how many rows changed."""
        changed = 0
        with self._failures("write"), self._transaction():
            for sql, parameters in statements:
                changed += max(0, self._execute(sql, parameters).rowcount)
        return changed

    @contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._driver_error as error:
            raise self._failed(doing, error) from error

    def _failed(self, doing: str, error: Exception) -> StoreError:
        return StoreError(f"history store {self._where}: cannot {doing}: {' '.join(str(error).split())}")

    def record_durations(self, rows: Sequence[DurationRow]) -> int:
        sql = f"INSERT INTO durations VALUES ({', '.join('?' * 11)}) ON CONFLICT DO NOTHING"
        return self._write((sql, _duration_columns(row)) for row in rows)

    def passing_durations(
        self, *, hardware: str, since: float, limit: int = 20, suite: str | None = None
    ) -> Mapping[tuple[str, str], list[int]]:
        only_suite = "" if suite is None else " AND suite = ?"
        sql = f"""SELECT suite, test, duration_ms FROM (
                SELECT suite, test, duration_ms, ROW_NUMBER() OVER (
                    PARTITION BY suite, test ORDER BY recorded_at DESC, run_id DESC, attempt DESC) AS age
                FROM durations
                WHERE hardware = ? AND outcome = 'passed' AND recorded_at >= ?{only_suite}) AS recent
            WHERE age <= ? ORDER BY suite, test, age"""
        parameters = [hardware, since, *([] if suite is None else [suite]), limit]
        found: dict[tuple[str, str], list[int]] = {}
        for suite_id, test, duration in self._rows(sql, parameters):
            found.setdefault((suite_id, test), []).append(int(duration))
        return found

    def outcomes(self, *, test: str, suite: str, limit: int = 20) -> list[tuple[str, str]]:
        sql = """SELECT run_id, outcome FROM (
                SELECT run_id, outcome, recorded_at, ROW_NUMBER() OVER (
                    PARTITION BY run_id ORDER BY attempt DESC, recorded_at DESC) AS age
                FROM durations WHERE test = ? AND suite = ?) AS last_attempts
            WHERE age = 1 ORDER BY recorded_at DESC, run_id DESC LIMIT ?"""
        return [(run, outcome) for run, outcome in self._rows(sql, (test, suite, limit))]

    def record_values(self, rows: Sequence[MetricValue]) -> int:
        sql = f"INSERT INTO metric_values VALUES ({', '.join('?' * 14)}) ON CONFLICT DO NOTHING"
        return self._write((sql, _value_columns(row)) for row in rows)

    def values(self, identity: MetricIdentity, *, state: str, limit: int, position: int = 0) -> list[MetricValue]:
        sql = f"""SELECT value, run_id, recorded_at, commit_id FROM metric_values
            WHERE {_SAME_SERIES} AND position = ? AND state = ? ORDER BY recorded_at DESC, run_id DESC LIMIT ?"""
        rows = self._rows(sql, (*identity.columns(), position, state, limit))
        return [
            MetricValue(identity, float(value), run, float(at), state=state, position=position, commit=commit)
            for value, run, at, commit in rows
        ]

    def promote(self, identity: MetricIdentity, *, position: int = 0, run_ids: Sequence[str] | None = None) -> int:
        if run_ids is not None and not run_ids:
            return 0
        only = "" if run_ids is None else f" AND run_id IN ({', '.join('?' * len(run_ids))})"
        sql = f"UPDATE metric_values SET state = ? WHERE {_SAME_SERIES} AND position = ? AND state = ?{only}"
        return self._write([(sql, (TRUSTED, *identity.columns(), position, CANDIDATE, *(run_ids or ())))])

    def positions(self, identity: MetricIdentity) -> list[int]:
        sql = f"SELECT DISTINCT position FROM metric_values WHERE {_SAME_SERIES} ORDER BY position"
        return [int(position) for (position,) in self._rows(sql, identity.columns())]

    def series(self) -> list[tuple[MetricIdentity, int, int]]:
        sql = f"""SELECT {_IDENTITY_LIST}, SUM(CASE WHEN state = ? THEN 1 ELSE 0 END),
                SUM(CASE WHEN state = ? THEN 1 ELSE 0 END)
            FROM metric_values GROUP BY {_IDENTITY_LIST} ORDER BY {_IDENTITY_LIST}"""
        width = len(IDENTITY_COLUMNS)
        return [
            (MetricIdentity(*row[:width]), int(row[width]), int(row[width + 1]))
            for row in self._rows(sql, (TRUSTED, CANDIDATE))
        ]


def _duration_columns(row: DurationRow) -> tuple[Any, ...]:
    head = (row.test, row.suite, row.backend, row.hardware, row.num_gpus, row.duration_ms, row.outcome, row.run_id)
    return (*head, row.recorded_at, row.attempt, row.commit)


def _value_columns(row: MetricValue) -> tuple[Any, ...]:
    tail = (row.position, row.value, row.state, row.run_id, row.recorded_at, row.commit)
    return (*row.identity.columns(), *tail)

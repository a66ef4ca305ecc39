"""History on a PostgreSQL server, for fleets whose runners share no disk. Needs the `ci` extra (psycopg)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from ci.history.errors import StoreError
from ci.history.sql import MIGRATIONS, SqlStore
from ci.history.store import SCHEMA_VERSION

CONNECT_TIMEOUT_S = 10
STATEMENT_TIMEOUT_MS = 30_000
# Any fixed number: two runners that meet an empty database take turns creating the tables.
_MIGRATION_LOCK = 7_264_310_031


class PostgresStore(SqlStore):
    """`PostgresStore(url)` connects and creates or migrates the tables in the connection's default schema."""

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise StoreError(
                "history store: MILES_CI_HISTORY_URL names a PostgreSQL server, but psycopg is not installed; "
                "install the ci extra (pip install 'miles-rl[ci]') or use sqlite:PATH"
            ) from error
        self._driver_error: type[Exception] = psycopg.Error
        self._where = _without_password(url)
        try:
            self._connection = psycopg.connect(
                url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                options=f"-c statement_timeout={STATEMENT_TIMEOUT_MS}",
            )
        except psycopg.Error as error:
            raise self._failed("connect", error) from error
        try:
            self._migrate()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def _migrate(self) -> None:
        with self._transaction("create tables"):
            execute = self._connection.execute
            execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK,))
            execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)")
            row = execute("SELECT version FROM schema_version").fetchone()
            version = row[0] if row else 0
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"history store {self._where}: schema version {version} is newer than {SCHEMA_VERSION}, "
                    "the newest this harness knows; update the checkout"
                )
            for step in MIGRATIONS[version:]:
                for statement in step:
                    execute(statement.encode())
            if version != SCHEMA_VERSION:
                execute("DELETE FROM schema_version")
                execute("INSERT INTO schema_version VALUES (%s)", (SCHEMA_VERSION,))

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[None]:
        try:
            with self._connection.transaction():
                yield
        except self._driver_error as error:
            raise self._failed(doing, error) from error

    def _rows(self, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(_percent(sql), tuple(parameters)).fetchall()
        except self._driver_error as error:
            raise self._failed("read", error) from error

    def _write(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> int:
        changed = 0
        with self._transaction("write"):
            for sql, parameters in statements:
                changed += max(0, self._connection.execute(_percent(sql), tuple(parameters)).rowcount)
        return changed

    def _failed(self, doing: str, error: Exception) -> StoreError:
        return StoreError(f"history store {self._where}: cannot {doing}: {' '.join(str(error).split())}")


def _percent(sql: str) -> bytes:
    """The shared SQL holds no literal `?` or `%`, so the placeholder style can be exchanged by text."""
    return sql.replace("?", "%s").encode()


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return url.replace(f":{parts.password}@", ":***@", 1)

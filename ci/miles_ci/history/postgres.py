"""History on a PostgreSQL server, for fleets whose runners share no disk. Needs psycopg (here: the `ci` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

from miles_ci.history.errors import StoreError
from miles_ci.history.sql import SqlStore

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
                "history store: the address names a PostgreSQL server, but psycopg is not installed; "
                "install psycopg[binary] or use sqlite:PATH"
            ) from error
        self._driver_error = psycopg.Error
        self._where = _without_password(url)
        with self._failures("connect"):
            self._connection = psycopg.connect(
                url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                options=f"-c statement_timeout={STATEMENT_TIMEOUT_MS}",
            )
        self._migrate()

    def close(self) -> None:
        self._connection.close()

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        # The shared SQL holds no literal `?` or `%`, so the placeholder style can be exchanged by text.
        return self._connection.execute(sql.replace("?", "%s").encode(), tuple(parameters))

    def _transaction(self) -> AbstractContextManager[Any]:
        return self._connection.transaction()

    def _lock_schema(self) -> None:
        self._execute("SELECT pg_advisory_xact_lock(?)", (_MIGRATION_LOCK,))


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return url.replace(f":{parts.password}@", ":***@", 1)

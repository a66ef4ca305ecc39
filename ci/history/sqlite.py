"""History in one SQLite file: WAL, so readers never wait for a writer; a writer waits up to 10 s for another."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ci.history.errors import StoreError
from ci.history.sql import MIGRATIONS, SqlStore
from ci.history.store import SCHEMA_VERSION

BUSY_TIMEOUT_S = 10.0


class SqliteStore(SqlStore):
    """`SqliteStore(path)` opens or creates the file; `:memory:` is refused, since no other process could read it."""

    def __init__(self, path: str | Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self._path = str(path)
        self._lock = threading.RLock()
        if self._path in ("", ":memory:"):
            raise StoreError("history store: SQLite needs the path of a file, e.g. sqlite:results/history.db")
        try:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            # Tests of one shard end in several threads; the lock below serialises them.
            self._connection = sqlite3.connect(
                self._path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
        except (OSError, sqlite3.Error) as error:
            raise self._failed("open", error) from error
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
            execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)")
            row = execute("SELECT version FROM schema_version").fetchone()
            version = row[0] if row else 0
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"history store {self._path}: schema version {version} is newer than {SCHEMA_VERSION}, "
                    "the newest this harness knows; update the checkout"
                )
            for step in MIGRATIONS[version:]:
                for statement in step:
                    execute(statement)
            if version != SCHEMA_VERSION:
                execute("DELETE FROM schema_version")
                execute("INSERT INTO schema_version VALUES (?)", (SCHEMA_VERSION,))

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[None]:
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield
                except BaseException:
                    self._connection.execute("ROLLBACK")
                    raise
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._failed(doing, error) from error

    def _rows(self, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._connection.execute(sql, tuple(parameters)).fetchall()
        except sqlite3.Error as error:
            raise self._failed("read", error) from error

    def _write(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> int:
        changed = 0
        with self._transaction("write"):
            for sql, parameters in statements:
                changed += self._connection.execute(sql, tuple(parameters)).rowcount
        return changed

    def _failed(self, doing: str, error: Exception) -> StoreError:
        return StoreError(f"history store {self._path}: cannot {doing}: {error}")

"""History in one SQLite file: WAL, so readers never wait for a writer; a writer waits up to 10 s for another."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles_ci.history.errors import NoSuchStore, StoreError
from miles_ci.history.sql import SqlStore

BUSY_TIMEOUT_S = 10.0
# SQLite's own word for SQLITE_BUSY; the number of an error is there from Python 3.11 on.
_BUSY = "database is locked"


class SqliteStore(SqlStore):
    """`SqliteStore(path)` opens the file, or makes it unless `create=False`; `:memory:` is refused, since no other
    process could read it."""

    _driver_error = sqlite3.Error

    def __init__(self, path: str | Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S, create: bool = True) -> None:
        self._where = str(path)
        self._lock = threading.RLock()
        if self._where in ("", ":memory:"):
            raise StoreError("history store: SQLite needs the path of a file, e.g. sqlite:results/history.db")
        if not create and not _holds_something(Path(self._where)):
            raise NoSuchStore(
                f"history store {self._where}: no such store; runs write it (MILES_CI_HISTORY_URL), here it is only "
                "read: check the address"
            )
        try:
            Path(self._where).parent.mkdir(parents=True, exist_ok=True)
            # Tests of one shard end in several threads; the lock below serialises them.
            self._connection = sqlite3.connect(
                self._where, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
            )
            self._use_wal(time.monotonic() + busy_timeout_s)
            self._execute("PRAGMA synchronous=NORMAL")
        except (OSError, sqlite3.Error) as error:
            raise self._failed("open", error) from error
        self._migrate()

    def close(self) -> None:
        self._connection.close()

    def _use_wal(self, deadline: float) -> None:
        """SQLite does not wait for the lock of a change of mode, so two runners that create the file would collide."""
        while True:
            try:
                self._execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if str(error) != _BUSY or time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        with self._lock:
            return self._connection.execute(sql, tuple(parameters))

    def _rows(self, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._lock:
            return super()._rows(sql, parameters)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                # A full disk has ended the transaction already.
                if self._connection.in_transaction:
                    self._execute("ROLLBACK")
                raise
            self._execute("COMMIT")

    def _lock_schema(self) -> None:
        """Nothing to do: BEGIN IMMEDIATE has taken the file's one write lock."""


def _holds_something(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size > 0
    except OSError:
        return False

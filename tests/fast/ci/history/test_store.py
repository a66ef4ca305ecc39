"""One conformance suite; every test runs on SQLite and on PostgreSQL."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
import threading

import pytest

from miles_ci.history.errors import StoreError
from miles_ci.history.records import CANDIDATE, TRUSTED, DurationRow, MetricIdentity, MetricValue
from miles_ci.history.store import open_store

pytestmark = pytest.mark.xdist_group("postgres")

ROW = DurationRow("tests/fast/test_a.py", "stage-a-cpu", "cpu", "cpu", 0, 1200, "passed", "run-1", 1000.0)
IDENTITY = MetricIdentity("tests/e2e/test_t.py", "cuda", "stage-c-8-gpu-h200", "h200", 8, "loss", "last", "abc")


def row(**changes) -> DurationRow:
    return dataclasses.replace(ROW, **changes)


def value(number: float, run: str, at: float = 0.0, **changes) -> MetricValue:
    return dataclasses.replace(MetricValue(IDENTITY, number, run, at), **changes)


def test_durations_come_back_newest_first_and_limited(store):
    assert store.record_durations([row(run_id=f"r{n}", recorded_at=n, duration_ms=n) for n in range(1, 31)]) == 30
    found = store.passing_durations(hardware="cpu", since=0, limit=20)
    assert found == {("stage-a-cpu", "tests/fast/test_a.py"): list(range(30, 10, -1))}


def test_only_passed_recent_runs_of_the_same_hardware_count(store):
    store.record_durations([
        row(run_id="failed", outcome="failed"),
        row(run_id="old", recorded_at=1.0),
        row(run_id="other", hardware="h200"),
        row(run_id="good", duration_ms=5),
    ])  # fmt: skip
    assert store.passing_durations(hardware="cpu", since=500.0) == {(ROW.suite, ROW.test): [5]}


def test_suites_can_be_asked_for_one_by_one(store):
    store.record_durations([row(), row(suite="stage-b-cpu", duration_ms=9)])
    assert store.passing_durations(hardware="cpu", since=0, suite="stage-b-cpu") == {("stage-b-cpu", ROW.test): [9]}


def test_writing_a_row_twice_keeps_the_first(store):
    assert store.record_durations([row(duration_ms=1)]) == 1
    assert store.record_durations([row(duration_ms=2), row(attempt=2, duration_ms=3)]) == 1
    assert sorted(store.passing_durations(hardware="cpu", since=0)[(ROW.suite, ROW.test)]) == [1, 3]


def test_outcome_of_a_run_is_that_of_its_last_attempt(store):
    store.record_durations([
        row(run_id="r1", outcome="failed", recorded_at=1),
        row(run_id="r1", outcome="passed", recorded_at=2, attempt=2),
        row(run_id="r2", outcome="failed", recorded_at=3),
    ])  # fmt: skip
    assert store.outcomes(test=ROW.test, suite=ROW.suite) == [("r2", "failed"), ("r1", "passed")]


def test_values_of_one_series_do_not_mix_with_another(store):
    other = dataclasses.replace(IDENTITY, spec_digest="xyz")
    store.record_values([value(1.0, "r1"), value(2.0, "r1", identity=other), value(3.0, "r1", position=5)])
    assert [v.value for v in store.values(IDENTITY, state=CANDIDATE, limit=9)] == [1.0]
    assert [v.value for v in store.values(other, state=CANDIDATE, limit=9)] == [2.0]
    assert [v.value for v in store.values(IDENTITY, state=CANDIDATE, limit=9, position=5)] == [3.0]
    assert store.positions(IDENTITY) == [0, 5]


def test_values_keep_their_sign_and_all_their_digits(store):
    numbers = [-4.0000000000000003e-4, 1e-300, 1.7976931348623157e308, 0.1]
    store.record_values([value(number, f"r{n}", n) for n, number in enumerate(numbers)])
    assert [v.value for v in store.values(IDENTITY, state=CANDIDATE, limit=9)] == numbers[::-1]


def test_promotion_moves_the_named_candidates_and_no_others(store):
    store.record_values([value(float(n), f"r{n}", n) for n in range(4)])
    assert store.promote(IDENTITY, run_ids=["r1", "r2"]) == 2
    assert [v.value for v in store.values(IDENTITY, state=TRUSTED, limit=9)] == [2.0, 1.0]
    assert store.promote(IDENTITY, run_ids=[]) == 0
    assert store.promote(IDENTITY) == 2
    assert store.series() == [(IDENTITY, 4, 0)]


def test_a_second_connection_sees_what_the_first_wrote(store, address):
    store.record_durations([row()])
    other = open_store(address)
    assert len(other.passing_durations(hardware="cpu", since=0)) == 1
    other.close()


def test_a_batch_is_written_whole_or_not_at_all(store):
    broken = row(run_id="second")
    object.__setattr__(broken, "suite", None)
    with pytest.raises(StoreError, match="cannot write"):
        store.record_durations([row(), broken])
    assert store.passing_durations(hardware="cpu", since=0) == {}


def test_two_runners_may_create_the_same_store_at_once(address):
    errors: list[Exception] = []

    def create(n: int) -> None:
        try:
            opened = open_store(address)
            opened.record_durations([row(run_id=f"run-{n}-{m}") for m in range(20)])
            opened.close()
        except StoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    opened = open_store(address)
    assert len(opened.passing_durations(hardware="cpu", since=0, limit=200)[(ROW.suite, ROW.test)]) == 80
    opened.close()


def test_creating_one_sqlite_file_at_once_never_collides(tmp_path):
    """The change to WAL does not wait for a lock by itself."""
    errors: list[Exception] = []

    def create(path: str, ready: threading.Barrier) -> None:
        try:
            ready.wait()
            open_store(path).close()
        except StoreError as error:
            errors.append(error)

    for number in range(20):
        ready = threading.Barrier(4)
        threads = [threading.Thread(target=create, args=(str(tmp_path / f"{number}.db"), ready)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def test_full_disk_is_an_error_that_says_so_and_leaves_the_store_usable(tmp_path):
    from miles_ci.history.sqlite import SqliteStore

    store = SqliteStore(tmp_path / "h.db")
    (pages,) = store._execute("PRAGMA page_count").fetchone()
    store._execute(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(StoreError, match=r"h\.db: cannot write: database or disk is full"):
        store.record_durations([row(run_id="x" * 500 + str(n)) for n in range(200)])
    store._execute("PRAGMA max_page_count=100000")
    assert store.passing_durations(hardware="cpu", since=0) == {}
    assert store.record_durations([row()]) == 1
    store.close()


def test_store_of_a_newer_harness_is_refused(store, address):
    store._write([("UPDATE schema_version SET version = ?", (99,))])
    with pytest.raises(StoreError, match="schema version 99 is newer than 1"):
        open_store(address)


def test_non_finite_values_are_never_stored():
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            value(number, "r")


def test_unreachable_server_is_named_without_its_password():
    with pytest.raises(StoreError) as caught:
        open_store("postgresql://me:secret@127.0.0.1:1/x")
    assert "127.0.0.1:1" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_addresses_choose_the_store(tmp_path):
    for address in (f"sqlite:{tmp_path}/a.db", f"sqlite://{tmp_path}/b.db", str(tmp_path / "c.db")):
        open_store(address).close()
    assert sorted(path.name for path in tmp_path.glob("*.db")) == ["a.db", "b.db", "c.db"]
    with pytest.raises(StoreError, match="'mysql' is not known"):
        open_store("mysql://host/db")
    with pytest.raises(StoreError, match="needs the path of a file"):
        open_store("sqlite:")


def test_who_only_reads_makes_no_store(tmp_path):
    from miles_ci.history.errors import NoSuchStore

    (tmp_path / "empty.db").touch()
    for address in (f"sqlite:{tmp_path}/a.db", f"sqlite:{tmp_path}/no/b.db", f"{tmp_path}/empty.db", str(tmp_path)):
        with pytest.raises(NoSuchStore, match="no such store") as caught:
            open_store(address, create=False)
        assert caught.value.exit_code == 2
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("empty.db", 0)]
    open_store(f"{tmp_path}/made.db").close()
    open_store(f"{tmp_path}/made.db", create=False).close()


def test_sqlite_runs_in_wal_mode_and_a_locked_file_is_an_error_after_the_timeout(tmp_path):
    from miles_ci.history.sqlite import SqliteStore

    store = SqliteStore(tmp_path / "h.db", busy_timeout_s=0.1)
    blocker = sqlite3.connect(tmp_path / "h.db", isolation_level=None)
    assert blocker.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        store.record_durations([row()])
    blocker.execute("ROLLBACK")
    assert store.record_durations([row()]) == 1
    blocker.close()
    store.close()


def test_damaged_sqlite_file_is_named(tmp_path):
    (tmp_path / "h.db").write_bytes(b"not a database, only text" * 100)
    with pytest.raises(StoreError, match=r"h\.db: cannot"):
        open_store(str(tmp_path / "h.db"))

"""The pytest plugin inside every test process of the runner (`-p miles_ci.run.process.event_writer`): it writes what really happened.

One JSON line per event into the file `MILES_CI_OBSERVED`: what was collected, what was made and left out again and by
whom, every phase of every item with its exception, what is being imported, workers that died. Also: stacks of all threads on SIGUSR1, and
a check that the process sees exactly the leased devices. With xdist the workers attach the exceptions and the
controller writes; a worker itself writes only which file it imports, since it may die of it.
Leaves out: judging (`miles_ci.run.judge.judge`). Imported into test processes: standard library and pytest only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from miles_ci.run.slug import slug
from miles_ci.valid_text import valid_text

OUTPUT_LIMIT = 20_000
MESSAGE_LIMIT = 4_000
MAX_FRAMES = 40
LEASE_MISMATCH_EXIT = 3

_EVENTS_KEY = "miles_ci_events"
# Reports of one subtest, which pytest knows since 9.0; an item's own reports come beside them.
_SUBTEST: tuple[type, ...] = (pytest.SubtestReport,) if hasattr(pytest, "SubtestReport") else ()

# Taken before pytest captures fd 2, so that stacks reach the log even from inside a captured test.
_STACKS = os.fdopen(os.dup(2), "w")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("miles-ci runner")
    # pytest's own --deselect takes prefixes: `test_a` would take `test_ab` away too.
    group.addoption("--runs-elsewhere", action="append", default=[], metavar="NODE", help="another part runs this item")


def pytest_configure(config: pytest.Config) -> None:
    # Known to strict markers also where their plugins are switched off or absent.
    config.addinivalue_line("markers", "xdist_group(name): tests of one group run in one worker")
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): limit of one test; the runner's own limit rules here")
    with contextlib.suppress(RuntimeError, ValueError):
        faulthandler.register(signal.SIGUSR1, file=_STACKS, all_threads=True, chain=False)
    # Taken away, so that a pytest started by a test does not write into our file.
    path = os.environ.pop("MILES_CI_OBSERVED", None)
    if path and not hasattr(config, "workerinput"):
        writer = EventWriter(path, Path(str(config.rootpath)))
        _check_lease(writer)
        config.pluginmanager.register(writer, "miles-ci-events")
    if path is None:
        path = getattr(config, "workerinput", {}).get(_EVENTS_KEY)
    if path:
        worker = getattr(config, "workerinput", {}).get("workerid", "main")
        config.pluginmanager.register(CollectionWatch(path, worker), "miles-ci-collection")


def _check_lease(writer: EventWriter) -> None:
    """Refuse to run on more, fewer or other devices than were leased for this test."""
    text = os.environ.get("MILES_CI_LEASE")
    lease: dict[str, Any] = json.loads(text) if text else {}
    backend = lease.get("backend")
    if "visible" in lease:
        # Of a backend that the project adds, whose driver is not known here: the variable must still be the lease's.
        seen = len([word for word in os.environ.get(lease["visible"], "").split(",") if word])
    elif backend in ("cuda", "rocm"):
        from miles_ci.run.devices import probe_child

        seen = probe_child.visible_count(backend)
    else:
        return
    expected = len(lease.get("devices", []))
    writer.write(event="devices", expected=expected, seen=seen)
    if seen != expected:
        pytest.exit(
            f"miles-ci: leased {expected} device(s), but this process sees {seen}", returncode=LEASE_MISMATCH_EXIT
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Each file has a metrics folder of its own, also where several files share a process."""
    base = os.environ.get("MILES_CI_METRICS_DIR")
    if base is None:
        return (yield)
    path = item.nodeid.partition("::")[0]
    os.environ["MILES_CI_METRICS_DIR"] = os.path.join(base, slug(path))
    os.makedirs(os.environ["MILES_CI_METRICS_DIR"], exist_ok=True)
    try:
        return (yield)
    finally:
        os.environ["MILES_CI_METRICS_DIR"] = base


class CollectionWatch:
    """In each process that collects: which file it is importing, so that one that kills it there is known by name, and
    which items it made that are not going to run."""

    def __init__(self, path: str, worker: str) -> None:
        self._path, self._worker = path, worker
        self._made: dict[str, None] = {}
        self._deselected: dict[str, str] = {}

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        if isinstance(collector, pytest.Module):
            self._write(event="importing", node=_plain_node(collector.nodeid), worker=self._worker)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_pycollect_makeitem(self) -> Generator[None, Any, Any]:
        """Innermost: before a conftest can thin out the items of one parametrized function."""
        made = yield
        for item in made if isinstance(made, list) else ():
            if isinstance(item, pytest.Item):
                self._made[item.nodeid] = None
        return made

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._made[item.nodeid] = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        elsewhere = frozenset(config.getoption("runs_elsewhere"))
        gone = [item for item in items if item.nodeid in elsewhere]
        if gone:
            config.hook.pytest_deselected(items=gone)
            items[:] = [item for item in items if item.nodeid not in elsewhere]

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        if items:
            who = _who_deselects(items[0].config)
            self._deselected.update((item.nodeid, who) for item in items)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(event="importing", node="", worker=self._worker)
        kept = {item.nodeid for item in session.items}
        gone = [node for node in self._made if node not in kept]
        if gone:
            dropped = f"dropped by {_droppers(session.config)}"
            self._write(
                event="left-out", nodes={_plain_node(node): self._deselected.get(node, dropped) for node in gone}
            )

    def _write(self, **event: Any) -> None:
        line = json.dumps(event) + "\n"
        # One write of one line in append mode: lines of several processes do not mix.
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)


class EventWriter:
    """Registered in the one process that sees all reports: pytest itself, or the xdist controller."""

    def __init__(self, path: str, root: Path) -> None:
        self._path = path
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed when the session ends
        self._root = root
        self._seen: set[str] = set()

    def write(self, **event: Any) -> None:
        self._file.write(json.dumps(event, ensure_ascii=True) + "\n")
        self._file.flush()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_EVENTS_KEY] = self._path

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        if error:
            self.write(event="worker-died", worker=node.gateway.id, text=str(error)[:MESSAGE_LIMIT])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.write(event="collected", nodes=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        fresh = [name for name in ids if name not in self._seen]
        self._seen.update(fresh)
        if fresh:
            self.write(event="collected", nodes=[_plain_node(name) for name in fresh])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.write(
                event="collect",
                node=_plain_node(report.nodeid),
                outcome=report.outcome,
                text=_crash_text(report),
                failure=getattr(report, "miles_ci", None),
            )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Before the setup, so that whoever hangs or kills the process there is known by name."""
        self.write(event="start", node=_plain_node(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        event: dict[str, Any] = {
            "event": "phase",
            "node": _plain_node(report.nodeid),
            "when": report.when,
            "outcome": report.outcome,
            "seconds": round(getattr(report, "duration", 0.0), 4),
        }
        if isinstance(report, _SUBTEST):
            event["subtest"] = report._sub_test_description()[:MESSAGE_LIMIT]
        if hasattr(report, "wasxfail"):
            event["xfail"] = str(report.wasxfail)
        if report.skipped and isinstance(report.longrepr, tuple):
            event["reason"] = str(report.longrepr[2])[:MESSAGE_LIMIT]
        if report.failed:
            event["failure"] = getattr(report, "miles_ci", None) or {
                "type": "crash",
                "exceptions": [_crash_text(report)],
                "frames": [],
                "asserted_in_test": False,
            }
            event["output"] = "\n".join(content for _, content in report.sections)[-OUTPUT_LIMIT:]
        self.write(**event)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.write(event="end", exit=int(exitstatus), failed=session.testsfailed, collected=session.testscollected)

    def pytest_unconfigure(self) -> None:
        self._file.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Attach the exception in plain form; xdist carries such attributes from the worker to the controller."""
    report = yield
    if report.failed and call.excinfo is not None:
        report.miles_ci = describe(call.excinfo, Path(str(item.config.rootpath)), Path(str(item.path)))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a worker sends must be valid text: half of a surrogate pair would end the worker, and with it the run."""
    return valid_text((yield))


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Warnings travel by a way of their own."""
    text = str(warning_message.message)
    if valid_text(text) != text:
        warning_message.message = UserWarning(f"{warning_message.category.__name__}: {valid_text(text)}")
        warning_message.category = UserWarning


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    try:
        report = yield
    except (SystemExit, KeyboardInterrupt, pytest.exit.Exception) as error:
        # The runner stops pytest by signals to the process, never so: the imported file did it, and fails alone.
        text = f"the file ends pytest while it is imported: {type_name(error)}: {error}".removesuffix(": ")
        return pytest.CollectReport(collector.nodeid, "failed", text, [])
    excinfo = getattr(getattr(report, "call", None), "excinfo", None)
    if report.failed and excinfo is not None:
        report.miles_ci = describe(excinfo, Path(str(collector.config.rootpath)), Path(str(collector.path)))
        # The call itself holds a live traceback, which xdist cannot send.
    return report


def describe(excinfo: pytest.ExceptionInfo[BaseException], root: Path, test_file: Path) -> dict[str, Any]:
    """Type, chain of exceptions and frames of one failure, with paths relative to the repository."""
    frames = []
    for entry in excinfo.traceback:
        code = entry.frame.code.raw
        frames.append([_relative(code.co_filename, root), code.co_name, entry.lineno + 1])
    exceptions: list[str] = []
    error: BaseException | None = excinfo.value
    while error is not None and len(exceptions) < 10:
        exceptions.append(f"{type_name(error)}: {error}"[:MESSAGE_LIMIT])
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return {
        "type": type_name(excinfo.value),
        "exceptions": exceptions,
        "frames": frames[-MAX_FRAMES:],
        "asserted_in_test": isinstance(excinfo.value, AssertionError)
        and bool(frames)
        and frames[-1][0] == _relative(str(test_file), root),
    }


def type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


def _who_deselects(config: pytest.Config) -> str:
    """Whose call of `pytest_deselected` this is: the option, or the file, that asked for it."""
    frame = sys._getframe(2)
    ours = ("/pluggy/", "/_pytest/config/")
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in ours):
        frame = frame.f_back
    path, function = frame.f_code.co_filename, frame.f_code.co_name
    if path == __file__:
        return "run by another part"
    if path.endswith("/_pytest/mark/__init__.py"):
        by_keyword = function == "deselect_by_keyword"
        return f"deselected by -{'k' if by_keyword else 'm'} {config.option.keyword if by_keyword else config.option.markexpr!r}"
    if path.endswith("/_pytest/main.py"):
        return "deselected by --deselect"
    return f"deselected by {_file_name(path, config)}"


def _droppers(config: pytest.Config) -> str:
    """Who may have taken items off the list without a word: whoever else looks at it."""
    known = ("_pytest", "xdist", "miles_ci")
    impls = config.hook.pytest_collection_modifyitems.get_hookimpls()
    modules = {impl.function.__module__: impl.function.__code__.co_filename for impl in impls}
    names = [_file_name(path, config) for name, path in modules.items() if name.partition(".")[0] not in known]
    conftests = [name for name in names if name.endswith("conftest.py")]
    return " or ".join(sorted(conftests or names)) or "a plugin"


def _file_name(path: str, config: pytest.Config) -> str:
    return _relative(path, Path(str(config.rootpath)))


def _plain_node(nodeid: str) -> str:
    """xdist's loadgroup appends `@group` to node ids."""
    head, separator, tail = nodeid.rpartition("@")
    return head if separator and "::" in head and "]" not in tail and "/" not in tail else nodeid


def _relative(path: str, root: Path) -> str:
    try:
        return Path(path).resolve().relative_to(root.resolve()).as_posix()
    except (ValueError, OSError):
        return path


def _crash_text(report: Any) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:MESSAGE_LIMIT]
    crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return str(text)[:MESSAGE_LIMIT]

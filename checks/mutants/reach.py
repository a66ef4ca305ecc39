"""Which items reach which line: one run of a package's tests under coverage.py."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coverage import Coverage
from coverage.data import CoverageData

from checks.mutants.changes import Change
from checks.mutants.copy import Copy
from checks.mutants.plugin import ITEM, Watch


@dataclass(frozen=True)
class Reach:
    """`lines`: file -> line -> items. `seconds`: item -> how long it takes. `failed`: items of no use here."""

    lines: Mapping[str, Mapping[int, frozenset[str]]]
    seconds: Mapping[str, float]
    failed: frozenset[str]

    def items(self, change: Change) -> frozenset[str]:
        """Those that run the changed statement; for one that runs at import, those that run anything of the file."""
        lines = self.lines.get(change.path, {})
        numbers = lines if change.at_import else range(change.lines[0], change.lines[1] + 1)
        return frozenset().union(*(lines.get(number, frozenset()) for number in numbers))


def measure(copy: Copy, folders: Sequence[str], tests: Sequence[str], *, limit_s: float) -> Reach:
    """What `tests` reach of the code in `folders`. Raises `RuntimeError` when the tests do not come to an end or none passes."""
    place = copy.beside / "coverage"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    settings = place / "settings"
    sources = "".join(f"\n    {copy.root / folder}" for folder in folders)
    names = ", ".join(folders)
    settings.write_text(
        f"[run]\nsource = {sources}\ndata_file = {place / 'data'}\nparallel = true\nsigterm = true\n"
        f"patch = _exit\ncontext = ${{{ITEM}-}}\ndisable_warnings = no-data-collected, module-not-measured\n"
    )
    # Processes that tests start are measured from their first line on.
    (place / "start").mkdir()
    (place / "start" / "sitecustomize.py").write_text("import coverage\n\ncoverage.process_startup()\n")
    environ = {"COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": str(place / "start")}
    told = place / "items.json"

    def watched() -> int:
        import pytest

        watch = Watch()
        measured = Coverage(config_file=str(settings))
        measured.start()
        code = int(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests], plugins=[watch]))
        measured.stop()
        measured.save()
        told.write_text(json.dumps([watch.seconds, sorted(watch.failed)]))
        return code

    end = copy.run(watched, cpu_s=limit_s, wall_s=2 * limit_s, environ=environ)
    if not told.exists():
        raise RuntimeError(f"{names}: the tests did not come to an end ({end.how})\n{end.output[-3000:]}")
    seconds, failed = json.loads(told.read_text())
    if not seconds.keys() - set(failed):
        raise RuntimeError(f"{names}: none of the tests passes\n{end.output[-3000:]}")
    return Reach(_lines(copy.root, place, frozenset(seconds) - frozenset(failed)), seconds, frozenset(failed))


def _lines(root: Path, place: Path, items: frozenset[str]) -> dict[str, dict[int, frozenset[str]]]:
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in sorted(place.glob("data*")):
        data = CoverageData(basename=str(file))
        data.read()
        for measured in data.measured_files():
            path = Path(measured).resolve()
            if not path.is_relative_to(root):
                continue
            lines = found[path.relative_to(root).as_posix()]
            for line, contexts in data.contexts_by_lineno(measured).items():
                # "static|dynamic": a process that a test started has the first, ours the second.
                names = {name for context in contexts for name in (context, *context.split("|", 1))}
                lines[line] |= names & items
    return {path: {line: frozenset(names) for line, names in lines.items()} for path, lines in found.items()}

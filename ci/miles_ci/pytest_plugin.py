"""pytest options for working with the registry on one's own machine.

    pytest --suite stage-b-cpu                  the tests of one suite, its own planner's view
    pytest --suite stage-a-cpu --shard 1/2      what the first of two shards would run
    pytest tests/fast-gpu                       GPU tests are skipped where the hardware is missing, with the reason
    pytest tests/fast-gpu --require-hardware    ... or fail

Which files belong where is read from their declarations, never by importing them; a file that cannot run here is not
imported at all. Inside `miles-ci run` the hardware is given, so nothing is skipped. Loaded on every pytest run:
standard library and pytest at import, everything else on first need.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from miles_ci.plan.model import Unit
    from miles_ci.select.registrations import Registration
    from miles_ci.workspace import Workspace

REGISTRY = "registry.yaml"
DEVICE_MARK = re.compile(rb"\bregister_(?!cpu_ci\b|metric_bound\b)\w+_ci\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("miles-ci")
    group.addoption("--suite", metavar="ID", help="only the tests registered in this suite of registry.yaml")
    group.addoption("--shard", metavar="I/N", help="with --suite: only shard I of N, as the planner divides it")
    group.addoption("--require-hardware", action="store_true", help="missing hardware is a failure, not a skip")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--shard") and not config.getoption("--suite"):
        raise pytest.UsageError("--shard I/N needs --suite ID: only a suite is divided into shards")
    plugin = RegistryPlugin(config)
    if config.getoption("--suite"):
        # A wrong name is one error at the start, not one for each folder.
        plugin.assigned()
    config.pluginmanager.register(plugin, "miles-ci-registry")


@dataclass
class _Assignment:
    """What `--suite` and `--shard` leave: path -> the planned units of that file."""

    units: dict[str, list[Unit]] = field(default_factory=dict)

    def runs(self, path: str, node: str) -> bool:
        return any(
            (unit.nodes is None or node in unit.nodes) and node not in unit.deselect for unit in self.units[path]
        )


class RegistryPlugin:
    """One for each pytest process; xdist workers compute the same assignment from the same files."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._root = Path(str(config.rootpath))
        self._assignment: _Assignment | None = None
        self._space: Workspace | None = None
        self._machine: dict[str, int] | None = None

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Files outside the chosen suite and shard are not even opened."""
        if not self._config.getoption("--suite") or collection_path.is_dir():
            return None
        path = self._relative(collection_path)
        if not Path(path).name.startswith("test_"):
            return None
        return True if path not in self.assigned().units else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not self._config.getoption("--suite"):
            return
        chosen = self.assigned()
        kept = [item for item in items if self._keeps(chosen, item.nodeid)]
        if len(kept) != len(items):
            kept_ids = {id(item) for item in kept}
            config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept_ids])
            items[:] = kept

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        """A GPU file that cannot run here becomes a module that only says so."""
        if "MILES_CI_LEASE" in os.environ or not (self._root / REGISTRY).is_file() or not _mentions_gpu(module_path):
            return None
        reason = self._missing(self._relative(module_path))
        if reason is None:
            return None
        module: _UnfitModule = _UnfitModule.from_parent(parent, path=module_path)
        module.reason = reason
        module.fatal = bool(self._config.getoption("--require-hardware"))
        return module

    def _keeps(self, chosen: _Assignment, node: str) -> bool:
        path = node.partition("::")[0]
        return path in chosen.units and chosen.runs(path, node)

    def _relative(self, path: Path) -> str:
        try:
            return path.relative_to(self._root).as_posix()
        except ValueError:
            return str(path)

    def _workspace(self) -> Workspace:
        if self._space is None:
            from miles_ci.workspace import Workspace

            self._space = Workspace.find(str(self._root))
        return self._space

    def assigned(self) -> _Assignment:
        if self._assignment is None:
            from miles_ci.errors import CiError

            try:
                self._assignment = _plan(
                    self._workspace(), self._config.getoption("--suite"), self._config.getoption("--shard")
                )
            except CiError as error:
                raise pytest.UsageError(str(error)) from error
        return self._assignment

    def _missing(self, path: str) -> str | None:
        """Why none of the file's registrations (of the chosen suite, if one is) can run here; None when one can."""
        from miles_ci.errors import CiError

        try:
            space = self._workspace()
            suite = self._config.getoption("--suite")
            found = [item for item in space.catalog.registrations if item.path == path and suite in (None, item.suite)]
            if not found or any(item.backend == "cpu" for item in found):
                return None
            if self._machine is None:
                self._machine = machine(space)
            reasons = [unmet(space, item, self._machine) for item in found]
        except CiError as error:
            raise pytest.UsageError(str(error)) from error
        return None if None in reasons else reasons[0]


class _UnfitModule(pytest.Module):
    """Stands for a file whose hardware is not here."""

    reason = ""
    fatal = False

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        if self.fatal:
            pytest.fail(f"--require-hardware: {self.reason}", pytrace=False)
        pytest.skip(self.reason, allow_module_level=True)


def _mentions_gpu(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return DEVICE_MARK.search(data) is not None


def _plan(space: Workspace, suite: str, shard: str | None) -> _Assignment:
    """The same assignment as `miles-ci run --suite S --shard i/n` makes: every label admitted."""
    from miles_ci.errors import UsageError, suggestion
    from miles_ci.plan.build import PlanOptions, build_plan
    from miles_ci.run.from_plan import parse_shard
    from miles_ci.select.policy import Policy
    from miles_ci.select.selection import select

    if suite not in space.fleet.suites:
        raise UsageError(f"--suite {suite}: not a suite of the registry{suggestion(suite, space.fleet.suites)}")
    index, count = parse_shard(shard) or (1, 1)
    policy = Policy.resolve(space.fleet, "regular", [], all_labels=True)
    selection = select(space.catalog, space.fleet, policy, today=space.today)
    options = PlanOptions(shards={suite: count}, suites=(suite,))
    plan = build_plan(space.catalog, space.fleet, selection, space.durations, options)
    chosen = _Assignment()
    for part in plan.shards_of(suite):
        if shard is None or part.index == index:
            for unit in part.units:
                chosen.units.setdefault(unit.path, []).append(unit)
    return chosen


def machine(space: Workspace) -> dict[str, int]:
    """Hardware model -> how many of it this process may use. A driver that cannot answer counts as no device."""
    from miles_ci.errors import CiError
    from miles_ci.registry.identify import model_of
    from miles_ci.run.devices.added import device_backend
    from miles_ci.run.devices.inventory import host_devices, inherited

    found: dict[str, int] = {}
    for backend in space.fleet.device_backends():
        try:
            asked = device_backend(space.fleet, backend, space.root)
            devices = inherited(host_devices(asked), asked)
        except CiError:
            continue
        for device in devices:
            name = model_of(space.fleet, backend, device.name) or device.name
            found[name] = found.get(name, 0) + 1
    return found


def unmet(space: Workspace, registration: Registration, found: Mapping[str, int]) -> str | None:
    """`needs 2 x hopper, found 1 x cpu`, or None when the machine meets the declaration."""
    declaration: Any = registration.declaration
    for name in declaration.hardware:
        if sum(found.get(model, 0) for model in space.fleet.models_of(name)) >= registration.num_gpus:
            return None
    have = ", ".join(f"{count} x {name}" for name, count in sorted(found.items())) or "1 x cpu"
    return f"needs {registration.num_gpus} x {' or '.join(declaration.hardware)}, found {have}"

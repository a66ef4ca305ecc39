"""The typed model of `registry.yaml`: what machines exist and when they are used.

Structure and ranges stand here, and become the JSON Schema; rules across entries (a pool names a known
hardware, needs form no circle, …) stand in `miles_ci.registry.checks`. All instances are frozen and closed.
Use `load_fleet`; durations are seconds, memory is GiB per device, times of day are UTC.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from miles_ci import __version__

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
# Control characters, and those that are not seen but change how a line reads (direction, joiners, separators).
_UNSEEN = r"\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"
Line = Annotated[str, StringConstraints(pattern=rf"^[^{_UNSEEN}]{{1,300}}$")]
RunnerLabel = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Glob = Annotated[str, StringConstraints(pattern=r"^[^/\s\\][^\s\\]{0,199}$")]
Folder = Annotated[str, StringConstraints(pattern=r"^[^/\s\\*?\[][^\s\\*?\[]{0,199}$")]
Reason = Annotated[str, StringConstraints(pattern=rf"^[^{_UNSEEN}]{{15,500}}$")]
Issue = Annotated[str, StringConstraints(pattern=r"^(#[1-9][0-9]{0,8}|https://[^\s]{4,500})$")]
IsoDate = Annotated[str, StringConstraints(pattern=r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$")]
Cron = Annotated[str, StringConstraints(pattern=r"^[0-9*,/-]+( [0-9*,/-]+){4}$")]
# Reaches scripts of workflows: nothing in it may mean anything to a shell.
Harness = Annotated[
    str,
    StringConstraints(
        pattern=r"^(\./[A-Za-z0-9_][A-Za-z0-9_-]*(/[A-Za-z0-9_][A-Za-z0-9_-]*)*|[a-z][a-z-]*(\[[a-z]+(,[a-z]+)*\])?==[0-9][0-9a-z.]*)$"
    ),
]
Seconds = Annotated[int, Field(ge=1, le=604_800)]

# Part of the name of a Python function, `register_<backend>_ci`.
BackendName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
Root = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}){0,7}$")
]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{0,99}$")]
Capability = Literal["bf16", "fp8", "fp8_fnuz", "mxfp8", "mxfp4", "nvfp4", "rdma", "nvlink"]
HostCapability = Literal["rdma", "nvlink"]
CadenceName = Literal["regular", "nightly", "weekly", "release"]
RetryKind = Literal["infra", "test", "timeout"]
RetryWhere = Literal["exception", "log_tail", "exit", "signal"]
RetryAction = Literal["retry", "retry_other_host", "stop_host", "none"]

VENDOR_OF_BACKEND: dict[str, str] = {"cpu": "cpu", "cuda": "nvidia", "rocm": "amd"}
ARCH_VENDOR: dict[str, str] = {
    "cpu": "cpu",
    **dict.fromkeys(("ampere", "ada", "hopper", "blackwell"), "nvidia"),
    **dict.fromkeys(("cdna2", "cdna3", "cdna4"), "amd"),
}
CPU_WORKERS = 2
DEFAULT_ROOT = "tests"


class Entry(BaseModel):
    """Base of all entries: strict types, unknown keys refused, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Exemption(Entry):
    """Why something is switched off, who follows it, and until which day (inclusive)."""

    reason: Reason
    issue: Issue
    until: IsoDate


class ReasonOnly(Entry):
    reason: Reason


class Backend(Entry):
    """Devices that the harness does not know itself; declared with `register_<name>_ci`.

    `devices` and `health` are commands that print one JSON object; docs/ci/registry.md says which. `visible` is the
    variable that shows a process the devices of its lease, as indices.
    """

    vendor: Name
    architectures: list[Name] = Field(min_length=1)
    visible: Variable
    devices: list[Line] = Field(min_length=1, max_length=32)
    health: list[Line] = Field(min_length=1, max_length=32)
    workflow: Literal["own"] = Field(description="no workflow is generated for its suites: the project has its own")


class Hardware(Entry):
    """One accelerator model. `memory_gib` is a usable lower bound, not the number on the box."""

    vendor: Name
    arch: Name
    sm: int | None = Field(None, ge=50, le=200, description="CUDA compute capability times ten; NVIDIA only")
    gfx: str | None = Field(None, pattern=r"^gfx[0-9a-f]{3,5}$", description="LLVM target; AMD only")
    memory_gib: int = Field(0, ge=0, le=4096)
    capabilities: list[Capability] = []


class Pool(Entry):
    """Runners of one kind. A job that asks for `labels` lands on any runner that carries all of them."""

    hardware: Name
    labels: list[RunnerLabel] = Field(min_length=1)
    gpus_per_runner: int = Field(ge=1, le=64)
    count: int = Field(ge=1, le=10_000, description="runners registered")
    hosts: list[RunnerLabel] = Field(default=[], description="machines that carry the runners")
    capabilities: list[HostCapability] = []
    disabled: Exemption | None = None


class Suite(Entry):
    """Tests that need the same machine at the same stage. GPU suites name pools; CPU suites `runs_on`."""

    tier: Literal["a", "b", "c"]
    backend: BackendName
    hardware: list[Name] = Field(min_length=1)
    gpus: int = Field(0, ge=0, le=64)
    pools: list[Name] = []
    runs_on: list[RunnerLabel] = []
    needs: Name | None = None
    target_wall_s: Seconds
    setup_s: Seconds | None = None
    min_shards: int = Field(1, ge=1, le=256)
    max_shards: int = Field(ge=1, le=256)
    timeout_s: Seconds
    test_timeout_s: Seconds
    affected: bool = False
    split: bool = False
    owner: Line
    allow_empty: ReasonOnly | None = None

    @property
    def setup_seconds(self) -> int:
        """`setup_s`, by default 60 on CPU and 300 on GPU."""
        if self.setup_s is not None:
            return self.setup_s
        return 60 if self.backend == "cpu" else 300


class Label(Entry):
    description: Line
    owner: Line


class ScopeLabel(Label):
    """A pull-request label that widens the run: all domain labels except `subtract`."""

    subtract: list[Name] = []


class Labels(Entry):
    """`domain` labels go on tests and, as `run-ci-<name>`, on pull requests; the others on pull requests only."""

    domain: dict[Name, Label] = Field(min_length=1)
    scope: dict[Name, ScopeLabel] = {}
    behaviour: dict[Name, Label] = {}


class Cadence(Entry):
    """One kind of run. `include` = all admits every domain label except `subtract`."""

    crons: list[Cron] = []
    admit_nightly: bool
    include: Literal["all", "requested"]
    subtract: list[Name] = []
    bypass_fastfail: bool
    write_baseline: bool
    arches: Literal["home", "all"]


class Edge(Entry):
    """A changed path that matches `when` affects every test that matches `tests`."""

    when: Glob
    tests: Glob


class SelectionRules(Entry):
    """`inert` never applies below tests/, ci/, a Python package, or a folder of `code`."""

    inert: list[Glob] = []
    edges: list[Edge] = []
    code: list[Folder] = []


class Image(Entry):
    repository: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._/:-]{0,199}$")]
    default_tag: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
    key_files: list[Glob] = Field(min_length=1)
    build_args: dict[Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")], Line] = {}


class RetryRule(Entry):
    """One row of failure classification; rows are tried in file order and the first match decides.

    `pattern` is a regular expression (exit codes and signal numbers are matched as decimal text).
    A `strong` row also overrules an assertion raised in the test file itself. `max_attempts` counts
    the first run.
    """

    kind: RetryKind
    where: list[RetryWhere] = Field(min_length=1)
    pattern: Annotated[str, StringConstraints(min_length=1, max_length=500)]
    action: RetryAction
    max_attempts: int = Field(1, ge=1, le=2)
    strong: bool = False


class Notification(Entry):
    kind: Literal["lark", "pr_comment", "summary"]
    secret: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{0,99}$")] | None = None
    when: Literal["always", "failure", "change"]
    cadences: list[CadenceName] = Field(min_length=1)


class Fleet(Entry):
    """The whole registry."""

    version: int = Field(ge=1, le=1)
    harness: Harness = Field(
        f"miles-ci=={__version__}",
        description="where generated workflows take the harness from: ./FOLDER of this repository, or NAME==VERSION",
    )
    roots: list[Root] = Field(
        default=[DEFAULT_ROOT], min_length=1, max_length=16, description="folders that hold tests"
    )
    backends: dict[BackendName, Backend] = {}
    approval_app: int | None = Field(
        None,
        ge=1,
        description="number of the GitHub App that writes approvals; runs of forks see no repository variables",
    )
    hardware: dict[Name, Hardware] = Field(min_length=1)
    pools: dict[Name, Pool] = {}
    suites: dict[Name, Suite] = Field(min_length=1)
    labels: Labels
    cadences: dict[CadenceName, Cadence]
    selection: SelectionRules
    images: dict[Name, Image] = {}
    retry: dict[Name, RetryRule] = {}
    notify: dict[Name, Notification] = {}

    def vendor_of(self, backend: str) -> str | None:
        """Whose devices a backend drives; None when there is no such backend."""
        added = self.backends.get(backend)
        return added.vendor if added is not None else VENDOR_OF_BACKEND.get(backend)

    def selection_rules(self) -> SelectionRules:
        """The written rules, and that nothing is inert below a test root."""
        return self.selection.model_copy(update={"code": [*self.selection.code, *self.roots]})

    def device_backends(self) -> list[str]:
        """Every backend with devices: those that are always there, then those that this registry adds."""
        return [*(name for name in VENDOR_OF_BACKEND if name != "cpu"), *self.backends]

    def models_of(self, name: str) -> tuple[str, ...]:
        """Hardware models that a model or architecture name stands for; empty when unknown."""
        if name in self.hardware:
            return (name,)
        return tuple(model for model, hardware in self.hardware.items() if hardware.arch == name)

    def hardware_names(self) -> list[str]:
        """Every name that a declaration may use: models, then architectures in use."""
        return list(dict.fromkeys([*self.hardware, *(item.arch for item in self.hardware.values())]))

    def fitting_pools(self, suite_id: str) -> dict[str, Pool]:
        """Pools of a suite whose runners have enough devices, enabled or not, in the suite's order."""
        suite = self.suites[suite_id]
        return {name: self.pools[name] for name in suite.pools if self.pools[name].gpus_per_runner >= suite.gpus}

    def enabled_pools(self, suite_id: str) -> dict[str, Pool]:
        """Fitting pools that are not switched off."""
        return {name: pool for name, pool in self.fitting_pools(suite_id).items() if pool.disabled is None}

    def width(self, suite_id: str) -> int:
        """Devices of one runner (the smallest among the enabled pools); xdist workers for a CPU suite."""
        if self.suites[suite_id].backend == "cpu":
            return CPU_WORKERS
        pools = self.enabled_pools(suite_id) or self.fitting_pools(suite_id)
        return min(pool.gpus_per_runner for pool in pools.values())

    def runner_slots(self, suite_id: str) -> int | None:
        """Runners that can take a shard now; None for hosted CPU runners, which are not counted."""
        if self.suites[suite_id].backend == "cpu":
            return None
        return sum(pool.count for pool in self.enabled_pools(suite_id).values())

    def capabilities(self, pool_name: str) -> frozenset[str]:
        """What tests on this pool may ask for: the hardware's capabilities and those the hosts add."""
        pool = self.pools[pool_name]
        return frozenset(self.hardware[pool.hardware].capabilities) | frozenset(pool.capabilities)

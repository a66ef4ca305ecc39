"""A workflow file as data: `Workflow.load(path)`; jobs, triggers, conditions with their implicit `success()`.

Only what the semantics need is typed; `raw` keeps the parsed YAML for lint. YAML booleans are `true`/`false`
alone, so that the key `on` stays a string. Raises `WorkflowError` naming file and job.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from miles_ci.errors import UsageError
from miles_ci.workflows.expr import STATUS_FUNCTIONS, ExpressionError, Node, compile_tree, parse, status_functions
from miles_ci.workflows.expr.evaluate import Evaluated

# Contexts GitHub offers in each place (job-level keys first).
JOB_IF = frozenset({"github", "needs", "vars", "inputs"})
STRATEGY = JOB_IF
CALL_WITH = JOB_IF | {"strategy", "matrix"}


# What a token can be given; https://docs.github.com/actions/reference/workflow-syntax-for-github-actions#permissions
SCOPES = (
    "actions", "attestations", "checks", "contents", "deployments", "discussions", "id-token", "issues", "models",
    "packages", "pages", "pull-requests", "repository-projects", "security-events", "statuses",
)  # fmt: skip


class WorkflowError(UsageError):
    """A workflow file that GitHub would refuse, or whose meaning cannot be simulated."""


class _Loader(yaml.SafeLoader):
    """SafeLoader whose booleans are those of YAML 1.2 and which refuses duplicate keys."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, Any]]]] = {  # type: ignore[misc]
        first: [(tag, pattern) for tag, pattern in rows if tag != "tag:yaml.org,2002:bool"]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise WorkflowError(f"line {key.start_mark.line + 1}: duplicate key {key.value!r}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_text(self, node: yaml.ScalarNode) -> str:
        text = self.construct_scalar(node)
        return BlockText(text) if node.style in ("|", ">") else text


class BlockText(str):
    """A block scalar (`|`, `>`). GitHub's parsers read braces in one differently from braces in a plain scalar."""

    __slots__ = ()


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_text)


def parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


@functools.lru_cache(maxsize=4096)
def compiled(source: str, contexts: frozenset[str], functions: frozenset[str]) -> tuple[Node, Evaluated]:
    """Parse and compile once; walkers evaluate the same conditions a million times."""
    node = parse(source, contexts=contexts, functions=functions)
    return node, compile_tree(node)


def strip_braces(source: str) -> str:
    """The expression of an `if`, with or without `${{ }}`.

    Anything around the braces makes the condition a non-empty string, which is always true, so it is refused; a space
    or the newline that ends a block scalar is enough.
    """
    if "${{" not in source:
        return source.strip()
    if isinstance(source, BlockText):
        raise ExpressionError(
            f"braces in a block scalar are text with a line end, always true: drop them from {source!r}"
        )
    if source.startswith("${{") and source.endswith("}}") and source.count("${{") == 1:
        return source[3:-2].strip()
    raise ExpressionError(f"text around ${{{{ }}}} makes the condition a non-empty string, always true: {source!r}")


@dataclass(frozen=True)
class Job:
    """One job. `condition` is the source without braces, None when there is no `if`."""

    id: str
    needs: tuple[str, ...]
    condition: str | None
    uses: str | None
    raw: Mapping[str, Any] = field(compare=False, hash=False, repr=False, default_factory=dict)

    @property
    def strategy(self) -> Mapping[str, Any]:
        """As written; a strategy that is one expression has no parts to look at here, `simulate` evaluates it."""
        stated = self.raw.get("strategy") or {}
        return {} if isinstance(stated, str) else stated

    @property
    def container(self) -> Mapping[str, Any]:
        """`container: IMAGE` is `container: {image: IMAGE}`; an empty one is none."""
        stated = self.raw.get("container") or {}
        return {"image": stated} if isinstance(stated, str) else stated

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.raw.get("steps") or []

    def tree(self) -> Node | None:
        return None if self.condition is None else compiled(self.condition, JOB_IF, STATUS_FUNCTIONS)[0]

    @functools.cached_property
    def states_status(self) -> bool:
        """Whether the condition calls a status function, which removes the implicit `success() &&`."""
        tree = self.tree()
        return tree is not None and bool(status_functions(tree))

    @functools.cached_property
    def effective_condition(self) -> Evaluated:
        """The effective condition: `success()` is added when no status function is called."""
        source = self.condition if self.condition is not None else "success()"
        if not self.states_status and self.condition is not None:
            source = f"success() && ({self.condition})"
        return compiled(source, JOB_IF, STATUS_FUNCTIONS)[1]


@dataclass(frozen=True)
class Workflow:
    """A parsed file; `jobs` in file order."""

    path: str
    name: str
    on: Mapping[str, Any]
    jobs: Mapping[str, Job]
    raw: Mapping[str, Any] = field(compare=False, hash=False, repr=False, default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Workflow:
        return cls.from_text(path.read_text(encoding="utf-8"), str(path))

    @classmethod
    def from_text(cls, text: str, path: str = "workflow.yml") -> Workflow:
        try:
            raw = parse_yaml(text)
        except (yaml.YAMLError, WorkflowError) as error:
            raise WorkflowError(f"{path}: {error}") from error
        return cls.from_dict(raw, path)

    @classmethod
    def from_dict(cls, raw: Any, path: str = "workflow.yml") -> Workflow:
        if not isinstance(raw, dict) or "on" not in raw or not isinstance(raw.get("jobs"), dict):
            raise WorkflowError(f"{path}: a workflow needs `on` and `jobs`")
        jobs = {str(name): _job(path, str(name), body) for name, body in raw["jobs"].items()}
        for job in jobs.values():
            unknown = [need for need in job.needs if need not in jobs]
            if unknown:
                raise WorkflowError(f"{path}: job {job.id} needs {unknown[0]!r}, which does not exist")
        workflow = cls(path, str(raw.get("name", path)), _triggers(raw["on"]), jobs, raw)
        workflow.order  # noqa: B018 - a cycle is an error of loading
        for job in jobs.values():
            workflow.permissions(job)
        return workflow

    @functools.cached_property
    def order(self) -> list[str]:
        """Job ids so that each comes after its needs; a cycle is a `WorkflowError`."""
        done: dict[str, None] = {}
        while len(done) < len(self.jobs):
            ready = [j for j in self.jobs if j not in done and all(n in done for n in self.jobs[j].needs)]
            if not ready:
                raise WorkflowError(f"{self.path}: needs form a cycle among {sorted(set(self.jobs) - set(done))}")
            done.update(dict.fromkeys(ready))
        return list(done)

    def closure(self, job_id: str) -> frozenset[str]:
        """All jobs that a job transitively needs, without itself."""
        if job_id not in self._closures:
            self._closures[job_id] = self._find_closure(job_id)
        return self._closures[job_id]

    def _find_closure(self, job_id: str) -> frozenset[str]:
        found: set[str] = set()
        todo = list(self.jobs[job_id].needs)
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo.extend(self.jobs[name].needs)
        return frozenset(found)

    @functools.cached_property
    def _closures(self) -> dict[str, frozenset[str]]:
        return {}

    def call_inputs(self) -> Mapping[str, Any]:
        return ((self.on.get("workflow_call") or {}).get("inputs")) or {}

    def permissions(self, job: Job) -> dict[str, str] | None:
        """Effective permissions of a job: its own, else the workflow's; None when neither states any."""
        for owner, raw in ((f"job {job.id}: ", job.raw), ("", self.raw)):
            if "permissions" in raw:
                return _permissions(f"{self.path}: {owner}permissions", raw["permissions"])
        return None

    @property
    def concurrency(self) -> Mapping[str, Any]:
        """`concurrency: GROUP` is `concurrency: {group: GROUP}`."""
        stated = self.raw.get("concurrency") or {}
        return {"group": stated} if isinstance(stated, str) else stated


def _permissions(place: str, stated: Any) -> dict[str, str]:
    """Scope -> level. `read-all` and `write-all` are spelled out."""
    if stated in ("read-all", "write-all"):
        level = stated.removesuffix("-all")
        return {scope: level for scope in SCOPES if level == "write" or scope != "id-token"}
    if not isinstance(stated, dict):
        raise WorkflowError(f"{place}: {stated!r} is neither a mapping of scopes nor read-all or write-all")
    wrong = [f"{scope}: {level}" for scope, level in stated.items() if level not in ("read", "write", "none")]
    if wrong:
        raise WorkflowError(f"{place}: {wrong[0]} is neither read, write nor none")
    return {str(scope): str(level) for scope, level in stated.items()}


def _triggers(on: Any) -> dict[str, Any]:
    if isinstance(on, str):
        return {on: {}}
    if isinstance(on, list):
        return {str(name): {} for name in on}
    return {str(name): body if body is not None else {} for name, body in on.items()}


def _job(path: str, name: str, body: Any) -> Job:
    if not isinstance(body, dict):
        raise WorkflowError(f"{path}: job {name} must be a mapping")
    needs = body.get("needs") or []
    needs = (needs,) if isinstance(needs, str) else tuple(str(need) for need in needs)
    condition = body.get("if")
    try:
        if condition is not None:
            text = condition if isinstance(condition, str) else json.dumps(condition)
            # An empty condition is none: the implicit success() stays.
            condition = strip_braces(text) or None
        job = Job(name, needs, condition, body.get("uses"), body)
        job.tree()
    except ExpressionError as error:
        raise WorkflowError(f"{path}: job {name}: if: {error}") from error
    return job


def load_all(root: Path) -> dict[str, Workflow]:
    """Every workflow of a repository by its file name."""
    return {path.name: Workflow.load(path) for path in workflow_files(root)}


def workflow_files(root: Path) -> list[Path]:
    """All files that GitHub reads as workflows: both endings."""
    folder = root / ".github" / "workflows"
    return sorted(path for path in folder.glob("*") if path.suffix in (".yml", ".yaml") and path.is_file())


def all_strings(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every string in parsed YAML with its place, for lint."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from all_strings(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from all_strings(item, f"{place}[{at}]")

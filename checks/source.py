"""Python packages as definitions: functions, classes with members, constants, and what each module imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Decorators that hand a definition to nobody: it must be reached by its own name.
PLAIN_DECORATORS = frozenset(
    [
        "abstractmethod",
        "asynccontextmanager",
        "cache",
        "cached_property",
        "classmethod",
        "contextmanager",
        "dataclass",
        "getter",
        "inference_mode",
        "jit",
        "lru_cache",
        "no_grad",
        "overload",
        "override",
        "property",
        "runtime_checkable",
        "setter",
        "staticmethod",
        "total_ordering",
        "wraps",
    ]
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Definition:
    """One function, class, constant, method or field; `name` is `module:Qualified.name`."""

    name: str
    line: int
    code: list[ast.AST]
    registers: bool = False
    members: dict[str, Definition] = field(default_factory=dict)

    @property
    def short(self) -> str:
        return self.name.rpartition(":")[2].rpartition(".")[2]


@dataclass
class Module:
    name: str
    path: Path
    body: list[ast.AST] = field(default_factory=list)
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)


def read_packages(folders: Mapping[str, Path]) -> dict[str, Module]:
    """Module name -> module, for every Python file of the packages."""
    modules = {}
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = read_module(name, path)
    return modules


def read_module(name: str, path: Path) -> Module:
    module = Module(name, path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for statement, runs in _flat(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            module.imports |= dict(bound_by(statement, package))
        if isinstance(statement, Function | ast.ClassDef):
            module.definitions[statement.name] = _definition(f"{name}:{statement.name}", statement)
        elif (target := _assigned(statement)) is not None:
            module.definitions[target] = Definition(f"{name}:{target}", statement.lineno, [statement])
        elif runs:
            module.body.append(statement)
    return module


def _flat(statements: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, bool]]:
    """Module level statements and whether they run: what stands under TYPE_CHECKING only binds names."""
    for statement in statements:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from ((inner, False) for inner in statement.body)
        else:
            yield statement, True


def _assigned(statement: ast.stmt) -> str | None:
    """The one plain name that a statement defines; `__all__` and the like run with the module."""
    target: ast.expr | None = None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    if not isinstance(target, ast.Name) or target.id.startswith("__") or target.id == "TYPE_CHECKING":
        return None
    return target.id


def _definition(name: str, node: Function | ast.ClassDef) -> Definition:
    registers = any(called_name(item) not in PLAIN_DECORATORS for item in node.decorator_list)
    if not isinstance(node, ast.ClassDef):
        return Definition(name, node.lineno, [node], registers)
    made = Definition(name, node.lineno, [*node.decorator_list, *node.bases, *node.keywords], registers)
    for statement in node.body:
        if isinstance(statement, Function | ast.ClassDef):
            known = made.members.get(statement.name)
            member = _definition(f"{name}.{statement.name}", statement)
            if known is not None:  # setters and overloads belong to one name
                member.code += known.code
            made.members[statement.name] = member
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = statement.target.id
            made.members[text] = Definition(f"{name}.{text}", statement.lineno, [])
            made.code.append(statement)
        else:
            made.code.append(statement)
    return made


def called_name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def bound_by(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, str]]:
    """(name here, what it is) for an import; `a.b` for a module, `a.b:c` for a name of one (or its submodule)."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        return
    base = node.module or ""
    if node.level:
        parent = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*parent, *([base] if base else [])])
    for alias in node.names:
        yield alias.asname or alias.name, f"{base}:{alias.name}"

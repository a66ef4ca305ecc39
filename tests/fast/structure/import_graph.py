"""Who imports whom inside a package, read from the source: at module level, or anywhere."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = {"miles": ROOT / "miles", "miles_ci": ROOT / "ci" / "miles_ci"}

Graph = dict[str, set[str]]


def modules_of(package: str, folder: Path | None = None) -> dict[str, Path]:
    """Dotted name -> file, of every module of the package."""
    folder = folder or FOLDERS[package]
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports_of(path: Path, module: str, *, lazy: bool) -> tuple[tuple[str, str], ...]:
    """(module, name) of every `from` import, (module, "") of every plain one; those for types only are left out.

    `lazy`: those inside functions too.
    """
    return tuple(_imports(path, module, lazy=lazy))


def _imports(path: Path, module: str, *, lazy: bool) -> Iterator[tuple[str, str]]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if not lazy and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((source, alias.name) for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def import_graph(package: str, *, lazy: bool, folder: Path | None = None) -> Graph:
    """Module -> the modules of the same package that it imports; a name that is a module counts as that module."""
    modules = modules_of(package, folder)
    graph: Graph = {}
    for module, path in modules.items():
        targets = set()
        for source, name in imports_of(path, module, lazy=lazy):
            target = f"{source}.{name}" if f"{source}.{name}" in modules else source
            if target in modules and target != module:
                targets.add(target)
        graph[module] = targets
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Every group of modules that reach each other, each sorted: the strongly connected components of more than one."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(start: str) -> None:
        work = [(start, iter(sorted(graph[start])))]
        index[start] = low[start] = len(index)
        stack.append(start)
        while work:
            node, targets = work[-1]
            target = next(targets, None)
            if target is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    group = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    if len(group) > 1:
                        found.append(sorted(group))
            elif target not in index:
                index[target] = low[target] = len(index)
                stack.append(target)
                work.append((target, iter(sorted(graph[target]))))
            elif target in stack:
                low[node] = min(low[node], index[target])

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)

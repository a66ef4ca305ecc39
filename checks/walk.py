"""The part of packages that runs: names followed from entry points through imports, attributes by name alone."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Mapping, Sequence

from checks.source import Definition, Function, Module, bound_by, called_name

# What a program given to another interpreter imports.
CODE_IN_TEXT = re.compile(r"\bfrom ([\w.]+) import (\w+)")


class Walk:
    """The live part of the packages, grown from entry points."""

    def __init__(
        self, modules: Mapping[str, Module], *, by_framework: Sequence[str], by_name_calls: Sequence[str]
    ) -> None:
        self.modules = modules
        self.by_framework = by_framework
        self.by_name_calls = by_name_calls
        self.live: set[str] = set()
        self._attributes: set[str] = set()
        self._classes: list[Definition] = []
        self._waiting: list[tuple[Module, ast.AST]] = []
        self._by_table: set[str] = set()  # modules imported by a computed name: any attribute may be one of theirs

    def from_entries(self, entries: Sequence[str]) -> set[str]:
        for entry in entries:
            self.reach(entry, whole=True)
        while self._waiting:
            module, node = self._waiting.pop()
            References(self, module).visit(node)
        return self.live

    def reach(self, target: str, *, whole: bool = False) -> None:
        """Make a module or definition live; with `whole` everything below it as well."""
        name, _, path = target.partition(":")
        if f"{name}.{path}" in self.modules and path not in self._definitions(name):
            name, path = f"{name}.{path}", ""
        if name not in self.modules:
            return
        self._import(name)
        module = self.modules[name]
        if not path:
            for definition in module.definitions.values() if whole else ():
                self._define(definition, module, whole=True)
            return
        first, *rest = path.split(".")
        if first in module.definitions:
            definition = module.definitions[first]
            self._define(definition, module, whole=whole and not rest)
            for part in rest:
                if part not in definition.members:
                    return
                definition = definition.members[part]
                self._define(definition, module, whole=whole)
        elif first in module.imports:
            following = ".".join([module.imports[first], *rest])
            if following != target:
                self.reach(following, whole=whole)

    def read_attribute(self, name: str) -> None:
        if name in self._attributes:
            return
        self._attributes.add(name)
        for definition in list(self._classes):
            if name in definition.members:
                self._define(definition.members[name], self._home(definition))
        for module in list(self._by_table):
            self.reach(f"{module}:{name}")

    def import_pattern(self, pattern: str) -> None:
        """A dotted module name in a string, or one with holes from an f-string."""
        for name in fnmatch.filter(self.modules, pattern):
            self._import(name)
            self._by_table.add(name)
            for attribute in list(self._attributes):
                if attribute in self.modules[name].definitions:
                    self.reach(f"{name}:{attribute}")

    def _definitions(self, module: str) -> Mapping[str, object]:
        known = self.modules.get(module)
        return {} if known is None else {**known.definitions, **known.imports}

    def _home(self, definition: Definition) -> Module:
        return self.modules[definition.name.partition(":")[0]]

    def _import(self, name: str) -> None:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            module = self.modules.get(".".join(parts[:count]))
            if module is None or module.name in self.live:
                continue
            self.live.add(module.name)
            self._waiting += [(module, node) for node in module.body]
            for definition in module.definitions.values():
                if definition.registers or self._by_frameworks(definition.short):
                    self._define(definition, module)

    def _define(self, definition: Definition, module: Module, *, whole: bool = False) -> None:
        if definition.name not in self.live:
            self.live.add(definition.name)
            self._waiting += [(module, node) for node in definition.code]
            if definition.members:
                self._classes.append(definition)
        for name, member in definition.members.items():
            dunder = name.startswith("__") and name.endswith("__")
            called = dunder or member.registers or name in self._attributes or self._by_frameworks(name)
            if (whole or called) and member.name not in self.live:
                self._define(member, module, whole=whole)

    def _by_frameworks(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.by_framework)


class References(ast.NodeVisitor):
    """What one piece of live code names. Names bound in a function are its own and refer to nothing outside."""

    def __init__(self, walk: Walk, module: Module) -> None:
        self.walk = walk
        self.module = module
        self.scopes: list[dict[str, str | None]] = []
        self.package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node)

    def _function(self, node: Function | ast.Lambda) -> None:
        if not isinstance(node, ast.Lambda):
            for outside in (*node.decorator_list, node.returns):
                if outside is not None:
                    self.visit(outside)
        self.visit(node.args)
        self.scopes.append(_bound_in(node, self.package))
        for statement in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(statement)
        self.scopes.pop()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.walk.reach(alias.name)
            if (beside := f"{self.package}.{alias.name}") in self.walk.modules:  # a program started by its path
                self.walk.reach(beside)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for _, target in bound_by(node, self.package):
            module, _, name = target.partition(":")
            self.walk.reach(f"{module}.{name}" if f"{module}.{name}" in self.walk.modules else module)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and (target := self._resolved(node)) is not None:
            self.walk.reach(target)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.IfExp):  # one of two modules or classes
            for choice in (node.value.body, node.value.orelse):
                self.visit(ast.Attribute(choice, node.attr, node.ctx))
        target = self._resolved(node)
        if target is not None:
            self.walk.reach(target)
        else:
            self.visit(node.value)
        if not isinstance(node.ctx, ast.Store):
            self.walk.read_attribute(node.attr)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        # `counter += 1` reads nothing that anyone sees.
        self.visit(node.target)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        called = called_name(node.func)
        if called in self.walk.by_name_calls:
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    self.walk.read_attribute(argument.value)
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            self.walk.read_attribute(name)
        if node.patterns and (target := self._resolved(node.cls)) is not None:  # positions stand for fields
            self.walk.reach(target, whole=True)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str):
            return
        for module, name in CODE_IN_TEXT.findall(node.value):
            self.walk.reach(f"{module}:{name}")
        named = re.fullmatch(r"(\w+(?:\.\w+)+)(?::(\w+))?", node.value)
        if named is None:
            return
        self.walk.import_pattern(named[1])
        if named[2] is not None:
            self.walk.reach(node.value)
        if node.value.endswith(".py"):  # a file beside this one, started by its path
            self.walk.import_pattern(f"{self.package}.{node.value.removesuffix('.py')}")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        if (
            "." in text
            and text.replace(".", "").replace("_", "").replace("*", "").isalnum()
            and not text.startswith("*")
        ):
            self.walk.import_pattern(text)
        for module, name in CODE_IN_TEXT.findall(text):
            self.walk.reach(f"{module}:{name}")
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)
                if part.format_spec is not None:
                    self.visit(part.format_spec)

    def _resolved(self, node: ast.expr) -> str | None:
        """`module` or `module:name` for a name, or for attributes of modules and classes; None for all else."""
        if isinstance(node, ast.Name):
            for scope in reversed(self.scopes):
                if node.id in scope:
                    return scope[node.id]
            if node.id in self.module.definitions:
                return f"{self.module.name}:{node.id}"
            target = self.module.imports.get(node.id)
            beside = f"{self.package}.{target}"
            return beside if target not in self.walk.modules and beside in self.walk.modules else target
        if not isinstance(node, ast.Attribute) or (base := self._resolved(node.value)) is None:
            return None
        if ":" not in base:
            return f"{base}:{node.attr}"
        module, _, name = base.partition(":")
        if f"{module}.{name}" in self.walk.modules:
            return f"{module}.{name}:{node.attr}"
        return f"{base}.{node.attr}" if module in self.walk.modules else None


def _bound_in(node: Function | ast.Lambda, package: str) -> dict[str, str | None]:
    """Names that a function binds: parameters, assignments, imports (with what they are), inner definitions."""
    arguments = node.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    bound: dict[str, str | None] = {item.arg: None for item in given if item is not None}
    outside: set[str] = set()
    waiting: list[ast.AST] = list(node.body) if isinstance(node.body, list) else [node.body]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, ast.Global | ast.Nonlocal):
            outside |= set(inner.names)
        elif isinstance(inner, ast.Import | ast.ImportFrom):
            bound |= dict(bound_by(inner, package))
        elif isinstance(inner, Function | ast.ClassDef):
            bound.setdefault(inner.name, None)
            continue
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            bound.setdefault(inner.id, None)
        if not isinstance(inner, ast.Lambda):
            waiting += ast.iter_child_nodes(inner)
    return {name: target for name, target in bound.items() if name not in outside}

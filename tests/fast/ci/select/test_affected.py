"""Which tests a change reaches; whatever is not understood selects everything and names the path."""

from __future__ import annotations

import ast
import subprocess
import sysconfig
from pathlib import Path

import pytest

from miles_ci.registry import load_fleet
from miles_ci.registry.model import SelectionRules
from miles_ci.select.affected import affected, affected_of_diff, affected_since
from miles_ci.select.diff import Change, DiffError, changes_since, parse_name_status
from miles_ci.select.globs import matches
from miles_ci.select.graph import Graph, python_files, read_imports
from miles_ci.select.imports import find_imports
from tests.fast.ci.helpers.trees import REPOSITORY

RULES = load_fleet(REPOSITORY / "registry.yaml").selection
TREE = {
    "miles/__init__.py": "",
    "miles/base.py": "",
    "miles/algos/__init__.py": "",
    "miles/algos/loss.py": "from miles.base import thing\n",
    "miles/algos/kl.py": "from . import loss\n",
    "miles/lazy.py": "import importlib\ndef f():\n    return importlib.import_module('miles.plugin')\n",
    "miles/plugin.py": "",
    "miles/tool.py": "",
    "miles/alone.py": "",
    "scripts/run.py": "import miles.base\n",
    "tests/fast/conftest.py": "import miles.tool\n",
    "tests/fast/test_loss.py": "import miles.algos.loss\n",
    "tests/fast/test_kl.py": "def test_x():\n    from miles.algos import (\n        kl,  # comment\n    )\n",
    "tests/fast/test_lazy.py": "from miles import lazy\n",
    "tests/fast/test_script.py": "COMMAND = ['python', 'scripts/run.py']\n",
    "tests/fast/test_module.py": "run(['python', '-m', 'miles.alone'])\n",
    "tests/e2e/deep/conftest.py": "",
    "tests/e2e/deep/test_deep.py": "",
    "tests/e2e/test_nothing.py": "",
}
TESTS = sorted(path for path in TREE if "/test_" in path)


def graph(tree: dict[str, str] = TREE, *before: dict[str, str]) -> Graph:
    states = [{path: find_imports(path, text.encode()) for path, text in state.items()} for state in (tree, *before)]
    return Graph(*states)


def reached(*paths: str) -> set[str]:
    found = affected([Change("M", path) for path in paths], graph(), RULES, TESTS)
    assert not found.everything, found.reason
    return {path.rpartition("/")[2] for path in found.tests}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("miles/base.py", {"test_loss.py", "test_kl.py", "test_script.py"}),
        ("miles/algos/kl.py", {"test_kl.py"}),
        ("miles/algos/__init__.py", {"test_loss.py", "test_kl.py"}),
        ("miles/plugin.py", {"test_lazy.py"}),
        ("miles/alone.py", {"test_module.py"}),
        ("scripts/run.py", {"test_script.py"}),
        ("tests/fast/test_kl.py", {"test_kl.py"}),
        ("tests/e2e/deep/conftest.py", {"test_deep.py"}),
        ("miles/tool.py", {"test_loss.py", "test_kl.py", "test_lazy.py", "test_script.py", "test_module.py"}),
    ],
)
def test_a_change_reaches_what_imports_it(changed: str, tests: set[str]) -> None:
    assert reached(changed) == tests


def test_every_package_on_the_way_is_executed_by_an_import() -> None:
    assert reached("miles/__init__.py") == {
        "test_loss.py",
        "test_kl.py",
        "test_lazy.py",
        "test_script.py",
        "test_module.py",
    }


def test_an_affected_test_knows_the_path_that_reaches_it() -> None:
    found = affected([Change("M", "miles/base.py")], graph(), RULES, TESTS)
    assert found.via["tests/fast/test_kl.py"] == "miles/base.py"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (Change("M", "assets/model.bin"), "assets/model.bin"),
        (Change("A", "tests/fast/data.json"), "tests/fast/data.json"),
        (Change("M", "miles/templates/page.html"), "miles/templates/page.html"),
        (Change("D", "miles/gone.py"), "miles/gone.py"),
        (Change("R", "docs/new.md", "miles/old.py"), "miles/old.py"),
        (Change("M", "registry.yaml"), "registry.yaml"),
        (Change("M", ".github/workflows/pr-test.yml"), ".github/workflows/pr-test.yml"),
        (Change("M", "ci/miles_ci/run/devices/slots.py"), "ci/miles_ci/run/devices/slots.py"),
        (Change("M", "conftest.py"), "conftest.py"),
        (Change("M", "tests/readme.md"), "tests/readme.md"),
    ],
)
def test_what_is_not_understood_or_touches_everything_selects_everything(change: Change, named: str) -> None:
    found = affected([Change("M", "miles/base.py"), change], graph(), RULES, TESTS)
    assert found.everything
    assert found.reason.startswith(named)


def test_the_root_conftest_reaches_tests_wherever_they_lie_and_nothing_else() -> None:
    tree = dict.fromkeys(
        ("conftest.py", "acme/code.py", "acme/test_code.py", "tests/e2e/test_a.py", "tests/tool.py"), ""
    )
    found = graph(tree).reached_from(["conftest.py"])
    assert sorted(found) == ["acme/test_code.py", "conftest.py", "tests/e2e/test_a.py", "tests/tool.py"]


def test_without_git_the_diff_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DiffError, match="git cannot be started: "):
        changes_since(tmp_path, "main")


def test_an_empty_diff_selects_everything() -> None:
    assert affected([], graph(), RULES, TESTS).everything


def test_inert_paths_reach_nothing_except_below_code_and_tests() -> None:
    assert reached("README.md", "docs/guide/start.md") == set()
    assert affected([Change("M", "miles/README.md")], graph(), RULES, TESTS).everything


@pytest.mark.parametrize("path", ["recipes/notes.md", "ci/README.md", "tests/README.md", "acme/docs/README.md"])
def test_nothing_is_inert_below_tests_ci_a_package_or_a_folder_that_the_registry_names(path: str) -> None:
    rules = SelectionRules(inert=["*.md", "**/*.md"], code=["recipes"])
    files = {"acme/__init__.py": find_imports("acme/__init__.py", b"")}
    assert affected([Change("M", path)], Graph(files), rules, TESTS).everything
    assert not affected([Change("M", "notes/README.md")], Graph(files), rules, TESTS).everything


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("src/acme/core.py", "from acme import core"),
        ("src/space/mod.py", "import space.mod"),
        ("packages/one/acme/core.py", "from acme.core import run"),
        ("python/acme/core.py", "import acme.core"),
    ],
)
def test_packages_below_a_source_root_are_found_under_the_name_they_are_imported_by(module: str, line: str) -> None:
    """A layout the graph did not know would make every test of it unaffected."""
    sources = {module: "", "tests/fast/test_core.py": f"{line}\n"}
    if "acme" in module:
        sources[module.replace("core.py", "__init__.py")] = ""
    found = Graph({path: find_imports(path, text.encode()) for path, text in sources.items()})
    rules = SelectionRules()
    assert affected([Change("M", module)], found, rules, ["tests/fast/test_core.py"]).tests == {
        "tests/fast/test_core.py"
    }


def test_an_environment_inside_the_repository_is_not_part_of_it(tmp_path: Path) -> None:
    for path in ("venv/lib/site.py", "venv/pyvenv.cfg", "acme/a.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert python_files(str(tmp_path)) == ["acme/a.py"]


def test_an_edge_adds_tests_to_those_of_the_graph() -> None:
    found = affected([Change("M", "recipes/quickstart.yaml")], graph(), RULES, TESTS)
    assert not found.everything
    assert found.tests == set(TESTS)


def test_deleted_and_renamed_modules_count_through_the_old_tree() -> None:
    after = {path: text for path, text in TREE.items() if path not in ("miles/algos/kl.py", "miles/plugin.py")}
    after["miles/algos/divergence.py"] = TREE["miles/algos/kl.py"]
    before = {"miles/algos/kl.py": TREE["miles/algos/kl.py"], "miles/plugin.py": ""}
    changes = [Change("R", "miles/algos/divergence.py", "miles/algos/kl.py"), Change("D", "miles/plugin.py")]
    found = affected(changes, graph(after, before), RULES, TESTS)
    assert found.tests == {"tests/fast/test_kl.py", "tests/fast/test_lazy.py"}


def test_name_status_output_is_parsed_with_renames_and_odd_names() -> None:
    output = "M\0a b.py\0R087\0old.py\0né\tw.py\0D\0x\ny\0".encode()
    assert parse_name_status(output) == [
        Change("M", "a b.py"),
        Change("R", "né\tw.py", "old.py"),
        Change("D", "x\ny"),
    ]


@pytest.mark.parametrize(
    "output", [b"M\0a", b"M\0", b"R100\0a\0", b"Z\0a\0", b"M a\n", b"M\0\0", b"M\0\xff\0", b"Mx\0a\0", b"R1\0a\0\0"]
)
def test_an_unreadable_diff_selects_everything(output: bytes, tmp_path: Path) -> None:
    with pytest.raises(DiffError):
        parse_name_status(output)
    found = affected_of_diff(tmp_path, output, RULES, TESTS)
    assert found.everything
    assert "the diff cannot be read" in found.reason


def test_an_unknown_base_selects_everything(tmp_path: Path) -> None:
    assert affected_since(tmp_path, "main", RULES, TESTS).everything
    assert affected_since(REPOSITORY, "--output=x", RULES, TESTS).everything


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def test_in_a_real_repository_a_deleted_module_still_reaches_its_tests(tmp_path: Path) -> None:
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    git(tmp_path, "checkout", "-q", "-b", "topic")
    (tmp_path / "miles/algos/kl.py").unlink()
    (tmp_path / "miles/alone.py").rename(tmp_path / "miles/together.py")
    (tmp_path / "tests/fast/test_new.py").write_text("import miles.base\n")
    tests = python_files(str(tmp_path))
    tests = [path for path in tests if "/test_" in path]
    found = affected_since(tmp_path, "main", RULES, tests)
    assert not found.everything, found.reason
    assert found.tests == {"tests/fast/test_kl.py", "tests/fast/test_module.py", "tests/fast/test_new.py"}


def names_by_ast(path: str, data: bytes) -> set[str]:
    """Absolute names that real import statements import (the reference for the fast reader)."""
    found: set[str] = set()
    parts = path.split("/")[:-1]
    for node in ast.walk(ast.parse(data)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            whole = ".".join(filter(None, (base, node.module)))
            found |= {whole} if whole else set()
            found |= {f"{whole}.{alias.name}" if whole else alias.name for alias in node.names if alias.name != "*"}
    return found


def test_no_import_statement_of_this_repository_or_the_standard_library_is_missed() -> None:
    roots = [(REPOSITORY, python_files(str(REPOSITORY)))]
    library = Path(sysconfig.get_path("stdlib"))
    packages = ("asyncio", "importlib", "json", "xml")
    files = sorted(file.relative_to(library).as_posix() for name in packages for file in (library / name).rglob("*.py"))
    roots.append((library, [file for file in files if "test" not in file]))
    checked = 0
    for root, paths in roots:
        for path in paths:
            data = (root / path).read_bytes()
            missed = names_by_ast(path, data) - set(find_imports(path, data).modules)
            assert not missed, (path, missed)
            checked += 1
    assert checked > 100


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("x = 1; import a.b", "a.b"),
        ("if x: from a import b", "a.b"),
        ("from a import b, \\\n    c", "a.c"),
        ("from a \\\n    import c", "a.c"),
        ("from a import (b,\n  # no\n  c as d)", "a.c"),
        ("import a as b, c.d as e", "c.d"),
        ("from ..x import y", "p.x.y"),
        ("from . import z", "p.q.z"),
        ("importlib.import_module('.w', __package__)", "p.q.w"),
        ("MODULES = {'run': 'a.commands.run'}", "a.commands.run"),
        ('subprocess.run("python -m a.tool --x", shell=True)', "a.tool"),
        ("\ufeffimport a", "a"),
        ("try:\r\n    import a\r\nexcept ImportError:\r\n    import b\r\n", "b"),
    ],
)
def test_every_way_of_importing_is_seen(source: str, name: str) -> None:
    assert name in find_imports("p/q/m.py", source.encode()).modules


@pytest.mark.parametrize(
    ("path", "glob", "expected"),
    [
        ("README.md", "*.md", True),
        ("docs/README.md", "*.md", False),
        ("docs/a/b.md", "docs/**", True),
        ("docs", "docs/**", False),
        ("a/b/c.lock", "**/*.lock", True),
        ("c.lock", "**/*.lock", True),
        ("tests/fast/ci/x.py", "tests/*/ci/**", True),
        ("tests/a.py", "tests/?.py", True),
        ("tests/ab.py", "tests/?.py", False),
        ("a+b.py", "a+b.py", True),
        ("any/thing", "**", True),
    ],
)
def test_globs_match_whole_paths(path: str, glob: str, expected: bool) -> None:
    assert matches(path, glob) is expected


def test_the_graph_of_this_repository_builds(tmp_path: Path) -> None:
    files = python_files(str(REPOSITORY))
    built = Graph(read_imports(str(REPOSITORY), files))
    via = built.reached_from(["ci/miles_ci/errors.py"])
    assert "tests/fast/ci/select/test_affected.py" in via

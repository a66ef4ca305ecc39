"""What documents name exists: paths, links, commands with their options, keys, recipes, variables.

`check_*` give faults as `file:line: text`; each is tried on a page with that fault too, so that a check that sees
nothing fails.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pages import ROOT, Page, all_pages, expand, read_page

from miles.config import ConfigError
from miles.config.environment import VARIABLES
from miles.recipe import load
from miles_ci.environment import VARIABLES as CI_VARIABLES

PAGES = {path.relative_to(ROOT).as_posix(): read_page(path) for path in all_pages()}
TOP = {entry.name for entry in ROOT.iterdir() if not entry.name.startswith(".venv")} - {"runs", "results"}
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
# Secrets and variables of the repository are declared where the workflows use them.
WORKFLOWS = "\n".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
# Folders that runs and tests make; documents name files in them that no checkout has.
MADE = ("runs/", "results/", "checkpoints/", "tensorboard/", "logs/")


def check_paths(page: Page) -> Iterator[str]:
    """Code spans that begin with a folder or file of the repository."""
    for line, span in page.spans():
        for text in expand(span):
            head, _, _ = text.partition("/")
            if head not in TOP or "/" not in text or " " in text or text.startswith(MADE):
                continue
            # `<name>` and NNNN stand for something that may not be there yet: what comes before them must be.
            before = re.split(r"<|NNNN", re.sub(r"(::.*|:\d+(:\d+)?)$", "", text))
            pattern = before[0].rstrip("/") if len(before) == 1 else before[0].rpartition("/")[0]
            if not any(ROOT.glob(pattern)):
                yield f"{page.place(line)}: {text} does not exist"


def check_links(page: Page) -> Iterator[str]:
    for line, link in page.links():
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.path if not path else (page.path.parent / path)
        if not target.exists():
            yield f"{page.place(line)}: link {link} leads nowhere"
        elif anchor and target.suffix == ".md" and anchor not in read_page(target).anchors():
            yield f"{page.place(line)}: {target.name} has no heading for #{anchor}"


def check_commands(page: Page) -> Iterator[str]:
    """Command lines of ours, parsed by the programs' own parsers; nothing runs."""
    for line, words in page.commands():
        fault = command_fault(words)
        if fault:
            yield f"{page.place(line)}: {' '.join(words)}: {fault}"


def command_fault(words: list[str]) -> str | None:
    """What the program's parser says. `[--option a|b]` is read with its option given; SOURCE stands for any path."""
    name, rest = Path(words[0]).name, [_given(word) for word in words[1:]]
    if name in ("miles", "miles-ci", "make"):
        return {"miles": miles_fault, "miles-ci": harness_fault, "make": make_fault}[name](rest)
    if name.startswith("python"):
        return python_fault(rest)
    return None


def _given(word: str) -> str:
    # A value in brackets or with alternatives, unless the word is a KEY=VALUE of its own.
    return word if "=" in word else word.removeprefix("[").removesuffix("]").partition("|")[0]


def miles_fault(words: list[str]) -> str | None:
    import typer

    from miles.cli import app

    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not words or words[0].startswith("-"):
            return None if words in ([], ["--help"]) else f"{words[0]} is no option here"
        if words[0] not in command.commands:
            return f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    if "--help" in words:
        return None
    try:
        context = command.make_context("miles", list(words))
    except Exception as error:  # the parser's own error class depends on typer's version
        placeholders = [word for word in words if re.fullmatch(r"<[^>]+>|[A-Z][A-Z_]+", word)]
        return None if any(f"'{word}'" in str(error) for word in placeholders) else str(error)
    return recipe_fault(context.params)


def recipe_fault(given: dict[str, object]) -> str | None:
    """A recipe that is named must load with the overrides that are named."""
    path = given.get("recipe")
    if not isinstance(path, Path) or path.parts[0] != "recipes" or not (ROOT / "recipes").is_dir():
        return None
    if path.name in ("mine.yaml",):
        return None
    try:
        load(ROOT / path, given.get("overrides") or [])
    except ConfigError as error:
        return str(error)
    return None


def harness_fault(words: list[str]) -> str | None:
    from miles_ci.cli import COMMANDS

    if not words or words[0].startswith("-"):
        return None
    if words[0] not in COMMANDS:
        return f"there is no command {words[0]}"
    module = importlib.import_module(COMMANDS[words[0]][0])
    parser = argparse.ArgumentParser(prog=words[0], exit_on_error=False, allow_abbrev=False)
    module.add_arguments(parser)
    if "--help" in words:
        return None

    def refuse(message: str) -> None:
        raise ValueError(message)

    parser.error = refuse  # type: ignore[method-assign]
    try:
        _, unknown = parser.parse_known_args(words[1:])
    except (argparse.ArgumentError, ValueError, SystemExit) as error:
        return str(error)
    return f"unknown: {' '.join(unknown)}" if unknown else None


def make_fault(words: list[str]) -> str | None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = [word for word in words if "=" not in word and not word.startswith("-")]
    missing = [word for word in wanted if word not in targets]
    return f"no target {', '.join(missing)}" if missing else None


def python_fault(words: list[str]) -> str | None:
    if words[:1] == ["-m"] and len(words) > 1:
        try:
            found = importlib.util.find_spec(words[1]) is not None
        except ModuleNotFoundError:
            found = False
        return None if found else f"there is no module {words[1]}"
    if words and words[0].endswith(".py") and not (ROOT / words[0]).exists():
        return f"there is no file {words[0]}"
    return None


def check_variables(page: Page) -> Iterator[str]:
    text = [*page.prose, *((fence.line, "\n".join(fence.lines)) for fence in page.fences)]
    for line, part in text:
        for name in re.findall(r"\bMILES_[A-Z0-9_]*[A-Z0-9]\b(?!\*)", part):
            if name not in VARIABLES and name not in CI_VARIABLES and name not in WORKFLOWS:
                yield f"{page.place(line)}: variable {name} is not declared"


def check_python(page: Page) -> Iterator[str]:
    """Python blocks compile, and what they import of ours exists."""
    for fence in page.fences:
        if fence.language != "python" or any(line.startswith(">>>") for line in fence.lines):
            continue
        try:
            tree = ast.parse("\n".join(fence.lines))
        except SyntaxError as error:
            yield f"{page.place(fence.line)}: {error.msg}"
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("miles", "miles_ci"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        yield f"{page.place(fence.line)}: {node.module} has no {alias.name}"


def check_yaml(page: Page, folder: Path = ROOT / "recipes") -> Iterator[str]:
    """YAML blocks that are recipes (they have `extends` or `schema_version`) load."""
    for fence in page.fences:
        text = "\n".join(fence.lines)
        if fence.language != "yaml" or not re.search(r"^(extends|schema_version):", text, re.MULTILINE):
            continue
        if re.search(r"^hardware:", text, re.MULTILINE):
            continue  # a piece of registry.yaml
        path = folder / f".docs-{fence.line}.yaml"
        path.write_text(text + "\n")
        try:
            load(path)
        except ConfigError as error:
            yield f"{page.place(fence.line)}: {error}"
        finally:
            path.unlink()


CHECKS: list[Callable[[Page], Iterator[str]]] = [
    check_paths,
    check_links,
    check_commands,
    check_variables,
    check_python,
    check_yaml,
]


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_exists(name: str) -> None:
    faults = [fault for check in CHECKS for fault in check(PAGES[name])]
    assert faults == []


DEFECTS: dict[Callable[[Page], Iterator[str]], dict[str, str]] = {
    check_paths: {
        "see `miles/recipe/lodaer.py`": "miles/recipe/lodaer.py does not exist",
        "see `miles/data/{prompts,nothing}.py`": "miles/data/nothing.py does not exist",
        "> see `tests/fast/nowhere/<area>`": "does not exist",
    },
    check_links: {
        "[x](nowhere.md)": "link nowhere.md leads nowhere",
        "# One\n[x](#two)": "has no heading for #two",
    },
    check_commands: {
        "```bash\nmiles trian x\n```": "there is no command trian",
        "```bash\nmiles train recipes/quickstart.yaml --sett a=1\n```": "--sett",
        "```bash\n$ FOO=1 .venv/bin/miles recipe check \\\n  recipes/quickstrat.yaml\n```": "no such file",
        "```bash\nmiles train recipes/quickstart.yaml --set algo.entropy=1  # why\n```": "unknown key 'algo.entropy'",
        "- text\n  ```bash\n  make quikstart\n  ```": "no target quikstart",
        "> ```bash\n> miles-ci list --sweet x\n> ```": "unknown: --sweet",
        "```bash\nmiles-ci lits\n```": "there is no command lits",
        "```console\n$ make test && make nothing\n```": "no target nothing",
        "```bash\npython -m miles.nothing\n```": "there is no module miles.nothing",
        "```bash\r\nmake nothing\r\n```\r\n": "no target nothing",
    },
    check_variables: {"set MILES_RUN_DIR": "MILES_RUN_DIR is not declared"},
    check_python: {
        "```python\nfrom miles.recipe import laod\n```": "miles.recipe has no laod",
        "```python\ndef (\n```": "invalid syntax",
    },
    check_yaml: {
        "```yaml\nextends: quickstart.yaml\nname: x\nsede: 1\n```": "unknown key 'sede'; did you mean 'seed'?"
    },
}


@pytest.mark.parametrize(
    ("check", "text", "said"),
    [(check, text, said) for check, cases in DEFECTS.items() for text, said in cases.items()],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else None,
)
def test_check_finds_its_defect(tmp_path: Path, check: Callable[[Page], Iterator[str]], text: str, said: str) -> None:
    path = tmp_path / "page.md"
    path.write_bytes(text.encode())
    faults = list(check(read_page(path)))
    assert len(faults) == 1, faults
    assert said in faults[0]


def test_every_check_has_a_defect_and_something_to_look_at() -> None:
    assert set(DEFECTS) == set(CHECKS)
    pages = PAGES.values()
    assert sum(len(page.commands()) for page in pages) > 20
    assert sum(len(page.links()) for page in pages) > 20
    assert sum(len(page.spans()) for page in pages) > 200


def test_every_page_is_in_the_index() -> None:
    index = PAGES["docs/README.md"]
    linked = {(index.path.parent / link.partition("#")[0]).resolve() for _, link in index.links()}
    pages = {path.resolve() for path in (ROOT / "docs").rglob("*.md")} - {index.path.resolve()}
    decisions = {path for path in pages if path.parent.name == "decisions"}
    missing = sorted(str(path.relative_to(ROOT)) for path in pages - decisions - linked)
    assert missing == [], "link these pages from docs/README.md"


def test_every_recipe_is_named_by_a_page() -> None:
    text = "\n".join((ROOT / name).read_text() for name in PAGES)
    assert [path.name for path in RECIPES if f"recipes/{path.name}" not in text] == []
    named = set(re.findall(r"recipes/([\w.-]+\.yaml)", text)) - {"mine.yaml", "quickstrat.yaml"}
    assert sorted(named - {path.name for path in RECIPES}) == []


def test_decisions_have_one_number_each_and_say_why() -> None:
    paths = sorted(set((ROOT / "docs" / "decisions").glob("*.md")) - {ROOT / "docs" / "decisions" / "README.md"})
    numbers = [path.name[:4] for path in paths]
    assert all(number.isdigit() for number in numbers)
    assert len(set(numbers)) == len(numbers)
    for path in paths:
        text = path.read_text()
        assert path.name[:4] in text.splitlines()[0], f"{path.name}: the title names its number"
        assert len(text.split("\n\n")) >= 3, f"{path.name}: say what made it necessary, the choice and what follows"

"""The runner of mutants: which changes it makes, which it draws, and its verdicts on a small project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checks.mutants.__main__ import ROOT, SETTINGS, drawn, main, share, stale_survivors
from checks.mutants.changes import Change, changes_of
from checks.mutants.settings import read_settings
from checks.mutants.trial import Outcome


def made(source: str) -> set[str]:
    """The changed statements, without those that leave a statement out or change what it returns."""
    text = source.encode()
    return {change.applied(text).decode() for change in changes_of("m.py", text)} - {"pass", "return None"}


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = a < b", {"x = a <= b"}),
        ("x = a <= b", {"x = a < b"}),
        ("x = a > b >= c", {"x = a >= b >= c", "x = a > b > c"}),
        ("x = a == b", {"x = a != b"}),
        ("x = a is not b", {"x = a is b"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = (a) in (b)", {"x = (a) not in (b)"}),
        ("x = a and b", {"x = a or b", "x = True and b", "x = a and True"}),
        ("x = a or b", {"x = a and b", "x = False or b", "x = a or False"}),
        ("x = not (a)", {"x =  (a)"}),
        ("x = -a", {"x = +a"}),
        ("x = a + b", {"x = a - b"}),
        ("x = a // b", {"x = a * b"}),
        ("x += y", {"x -= y", "pass"} - {"pass"}),
        ("x = 3", {"x = 4"}),
        ("x = 0.0", {"x = 1.0"}),
        ("x = True", {"x = False"}),
        ("if a: x = b", {"if (not (a)): x = b"}),
        ("x = b if a else c", {"x = b if (not (a)) else c"}),
        ("x = [a for a in b if c]", {"x = [a for a in b if (not (c))]"}),
        ("f(é, a < b)", {"f(é, a <= b)"}),
        ("def f(a=1): return a", {"def f(a=2): return a", "def f(a=1): return None"}),
        ("while a:\n    break", {"while (not (a)):\n    break", "while a:\n    continue"}),
        ("if a < b:\n    raise E(c + 1)", {"if a <= b:\n    raise E(c + 1)", "if a < b:\n    pass"}),
        ("self.x = y", set()),
    ],
)
def test_each_kind_of_change(source: str, changed: set[str]) -> None:
    assert made(source) == changed


@pytest.mark.parametrize(
    "source",
    [
        '"""Words, 1."""',
        "import a",
        "x: int",
        "@f(1)\ndef g() -> C[1]: ...",
        "def f(a: 'C[1]'): ...",
        "x = f'{a + 1}'",
        "x = 'a'",
        "x = 'a' + b",
        "__all__ = f(1)",
        "if TYPE_CHECKING:\n    x = 1",
        "x = None",
    ],
)
def test_words_and_types_are_left_alone(source: str) -> None:
    assert changes_of("m.py", source.encode()) == []


@pytest.mark.parametrize("source", ["f(x)", "self.x = y", "x[0] = y", "del x", "assert x", "x += y"])
def test_a_statement_is_left_out(source: str) -> None:
    text = source.encode()
    assert "pass" in {change.applied(text).decode() for change in changes_of("m.py", text)}


def test_a_change_knows_its_statement_and_function() -> None:
    source = b"class A:\n    def f(self):\n        if (x and\n                y):\n            return g(\n                1)\n"
    (one,) = [change for change in changes_of("m.py", source) if change.before == "1"]
    (y,) = [change for change in changes_of("m.py", source) if change.before == "y"]
    assert (one.lines, one.line, one.within, one.text) == ((5, 6), 6, "A.f", "1)")
    assert (y.lines, y.line) == ((3, 4), 4)
    assert not one.at_import
    defaults = changes_of("m.py", b"class A:\n    x = 1\n    def f(self, y=2): ...\n")
    assert [(change.before, change.at_import) for change in defaults] == [("1", True), ("2", True)]
    assert str(one) == "m.py:6 A.f: `1` -> `2`"


def test_every_change_of_this_repository_compiles_and_the_settings_fit_it() -> None:
    settings = read_settings(SETTINGS)
    for package in settings.packages.values():
        assert package.test_files(ROOT), f"{package.folder} has no tests"
        for change in package.changes(ROOT)[::23]:
            compile(change.applied((ROOT / change.path).read_bytes()), change.path, "exec", dont_inherit=True)
    assert stale_survivors(settings, ROOT) == []


def a_change(number: int) -> Change:
    return Change("m.py", number, number + 1, "2", "1", 1, (1, 1), False, "f", f"x = {number % 90}")


def test_the_same_seed_draws_the_same_changes() -> None:
    changes = [a_change(number) for number in range(100)]
    assert drawn(changes, 7, "a") == drawn(changes, 7, "a") == sorted(drawn(changes, 7, "a"))
    assert drawn(changes, 7, "a") != drawn(changes, 7, "b")
    assert len(set(drawn(changes, 7, "a"))) == 7
    fewer = changes[:50] + changes[60:]
    assert {change for change in drawn(changes, 30, "a") if change in fewer} <= set(drawn(fewer, 30, "a"))
    assert drawn(changes, 0, "a") == drawn(changes, 200, "a") == changes


def test_what_is_listed_is_no_part_of_the_share() -> None:
    verdicts = ["seen", "stopped", "survived", "unreached", "listed"]
    assert share([Outcome(a_change(0), verdict, 1, "") for verdict in verdicts]) == 0.5
    assert share([]) == 1.0


PRICE = """\
import subprocess
import sys
import time

LEAST = 3


def price(count):
    if count < 0:
        raise ValueError("a count is 0 or more")
    total = 0
    while count > 0:
        total += LEAST
        count -= 1
    return total


def unseen(count):
    return count + 1


def never(count):
    return count * 2


def told(count):
    return count - 1
"""
TESTS = """\
import subprocess
import sys

import pytest

from shop import price


def test_price():
    assert price.price(2) == 6
    with pytest.raises(ValueError, match="0 or more"):
        price.price(-1)


def test_unseen():
    price.unseen(1)


def test_told_by_another_process():
    code = "from shop import price; print(price.told(3))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "2\\n"


def test_that_always_fails():
    assert price.price(1) == 0
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    files = {
        "shop/__init__.py": "", "shop/price.py": PRICE, "tests/test_price.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
        "mutants.toml": 'share = 0.9\npatience_s = 3\n[packages]\n"shop" = ["tests"]\n',
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def mutants(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "checks.mutants",
        "--root",
        str(project),
        "--settings",
        str(project / "mutants.toml"),
    ]
    return subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.timeout(900)
def test_verdicts_on_a_small_project(project: Path, tmp_path: Path) -> None:
    entry = {"path": "shop/price.py", "within": "unseen", "text": "return count + 1", "before": "1", "after": "2"}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in entry.items())
    with open(project / "mutants.toml", "a") as file:
        file.write(f"[[survivor]]\n{lines}reason = 'for this test'\n")
    done = mutants(project, "--sample", "0", "--out", str(tmp_path / "out.json"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "left out, fails without any change: tests/test_price.py::test_that_always_fails" in done.stdout
    found = {
        (one["change"]["within"], one["change"]["before"], one["change"]["after"]): one["verdict"]
        for one in json.loads((tmp_path / "out.json").read_text())["shop"]
    }
    assert found["module", "3", "4"] == "seen"
    assert found["price", "<", "<="] == "survived"
    assert found["price", "-", "+"] == "stopped"
    assert found["price", "count -= 1", "pass"] == "stopped"
    assert found["price", "total += LEAST", "pass"] == "seen"
    assert found["unseen", "+", "-"] == "survived"
    assert found["unseen", "1", "2"] == "listed"
    assert found["never", "*", "/"] == "unreached"
    assert found["told", "-", "+"] == "seen"
    assert (project / "shop/price.py").read_text() == PRICE
    line = PRICE[: PRICE.index("return count + 1")].count("\n") + 1
    assert f"survived  shop/price.py:{line} unseen: `+` -> `-` (1 tests pass)" in done.stdout


def test_an_entry_of_code_that_is_gone_is_an_error(project: Path) -> None:
    with open(project / "mutants.toml", "a") as file:
        file.write(
            "[[survivor]]\npath = 'shop/price.py'\nwithin = 'f'\ntext = 'x'\nbefore = '1'\nafter = '2'\nreason = 'r'\n"
        )
    settings = read_settings(project / "mutants.toml")
    (line,) = stale_survivors(settings, project)
    assert line.startswith("stale: shop/price.py f: `1` -> `2` is listed as a survivor")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shop/none"], "shop/none: not in mutants.toml, which has shop"),
        (["--sample", "-1"], "--sample must be 0 or more"),
    ],
)
def test_wrong_usage_is_told(project: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--root", str(project), "--settings", str(project / "mutants.toml")])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sare = 1\n", "unknown sare"),
        ("[[survivor]]\npath = 'x'\n", "survivor 1 needs path, within"),
        ("[[survivor]]\npath='a'\nwithin='a'\ntext='a'\nbefore='a'\nafter='a'\nreason=' '\n", "and a reason"),
    ],
)
def test_faulty_settings_are_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mutants.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_settings(tmp_path / "mutants.toml")

"""The check for unreachable code, on small packages: what it finds, what it follows, and exceptions that are none."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from checks.reachable import Settings, entry_points, faults, main, read_settings
from checks.source import read_packages

MAIN = "from shop import stock\n\ndef main():\n    stock.sell()\n"


def check(folder: Path, files: dict[str, str], started=("shop.cli:main",), **settings) -> list[str]:
    """Faults of a package `shop` with these files; `NAME` for unreachable ones, whole lines for the rest."""
    for name, text in {"__init__.py": "", **files}.items():
        path = folder / "shop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    given = {"packages": {"shop": "shop"}, "entries": {}, "kept": {}, "by_framework": {}, "by_name_calls": []}
    found = faults(read_packages({"shop": folder / "shop"}), Settings(**{**given, **settings}), started)
    return [
        line.split(": ", 1)[1].removesuffix(" is reached by no entry point") if ".py:" in line else line
        for line in found
    ]


def test_a_planted_dead_function_class_constant_method_field_and_module_are_found(tmp_path):
    stock = """
        from dataclasses import dataclass

        LIMIT, USED = 3, 4
        SPARE = 5

        @dataclass
        class Item:
            name: str
            colour: str

            def label(self):
                return self.name

            def weigh(self):
                return 1

        class Shelf:
            pass

        def sell():
            return Item("a", "b").label()

        def count():
            return SPARE
    """
    found = check(tmp_path, {"cli.py": MAIN, "stock.py": stock, "attic.py": "def old():\n    pass\n"})
    assert found == [
        "shop.attic",
        "shop.stock.SPARE",
        "shop.stock.Item.colour",
        "shop.stock.Item.weigh",
        "shop.stock.Shelf",
        "shop.stock.count",
    ]


@pytest.mark.parametrize(
    "body",
    [
        "def sell():\n    return helper()\n\ndef helper():\n    pass\n",
        "def sell(given: Kind):\n    pass\n\nclass Kind:\n    pass\n",
        "from shop.more import helper\n\ndef sell():\n    helper()\n",
        "def sell():\n    from shop import more\n    more.helper()\n",
        "import shop.more\n\ndef sell():\n    shop.more.helper()\n",
        "from shop import front\n\ndef sell():\n    front.helper()\n",
        "from shop import more, front\n\ndef sell(flag):\n    (more if flag else front).helper()\n",
        "TABLE = {'a': 'shop.more'}\n\ndef sell(name):\n    return load(TABLE[name]).helper()\n\ndef load(name):\n    pass\n",
        "CALL = 'shop.more:helper'\n\ndef sell():\n    return CALL\n",
        "def sell(name):\n    return load(f'shop.{name}').helper()\n\ndef load(name):\n    pass\n",
        "PROGRAM = 'from shop.more import helper; helper()'\n\ndef sell():\n    return PROGRAM\n",
        "class Pair:\n    left: int\n    right: int\n\ndef sell(pair):\n    match pair:\n        case Pair(a, b):\n            return a\n",
        "WIDTH = 3\n\ndef sell(n):\n    return f'{n:{WIDTH}}'\n",
    ],
)
def test_what_is_reached_by_any_road_is_not_reported(tmp_path, body):
    files = {"cli.py": MAIN, "stock.py": body}
    if "more" in body or "shop.{" in body or "front" in body:
        files |= {"more.py": "def helper():\n    pass\n"}
    if "front" in body:
        files |= {"front.py": "from shop.more import helper\n"}
    assert check(tmp_path, files) == []


def test_a_program_started_by_its_path_runs(tmp_path):
    stock = "from pathlib import Path\n\ndef sell():\n    return Path(__file__).with_name('sweeper.py')\n"
    sweeper = "import broom\n\ndef main():\n    broom.sweep()\n\nif __name__ == '__main__':\n    main()\n"
    files = {"cli.py": MAIN, "stock.py": stock, "sweeper.py": sweeper, "broom.py": "def sweep():\n    pass\n"}
    assert check(tmp_path, files) == []


@pytest.mark.parametrize(
    ("body", "dead"),
    [
        # A name of its own hides the function.
        ("def sell():\n    helper = 1\n    return helper\n\ndef helper():\n    pass\n", ["shop.stock.helper"]),
        ("def sell(helper):\n    return helper\n\ndef helper():\n    pass\n", ["shop.stock.helper"]),
        # Only itself, or another dead one, calls it.
        ("def sell():\n    pass\n\ndef helper():\n    return helper()\n", ["shop.stock.helper"]),
        # To be imported, listed or written is not to be used.
        ("from shop.more import helper\n\ndef sell():\n    pass\n", ["shop.more.helper"]),
        ("__all__ = ['helper', 'sell']\n\ndef sell():\n    pass\n\ndef helper():\n    pass\n", ["shop.stock.helper"]),
        ("class Till:\n    def __init__(self):\n        self.cash = 0\n    cash: int = 0\n\ndef sell():\n    Till()\n", ["shop.stock.Till.cash"]),
        # What only type checkers read imports nothing.
        ("from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from shop.more import helper\n\ndef sell():\n    pass\n", ["shop.more"]),
    ],
)  # fmt: skip
def test_what_only_looks_reached_is_reported(tmp_path, body, dead):
    files = {"cli.py": MAIN, "stock.py": body} | ({"more.py": "def helper():\n    pass\n"} if "more" in body else {})
    assert check(tmp_path, files) == dead


def test_a_registering_decorator_makes_a_function_reached_and_a_plain_one_does_not(tmp_path):
    stock = """
        from functools import cache
        import web

        app = web.App()

        @app.route("/")
        def page():
            return helper()

        def helper():
            pass

        class Till:
            @app.check("cash")
            def counted(self):
                pass

            @property
            def empty(self):
                pass

        @cache
        def slow():
            pass

        def sell():
            return app, Till
    """
    assert check(tmp_path, {"cli.py": MAIN, "stock.py": stock}) == ["shop.stock.Till.empty", "shop.stock.slow"]


def test_methods_called_by_a_name_in_a_string_or_by_a_library_are_stated_in_the_settings(tmp_path):
    stock = """
        class Till:
            def open(self):
                pass

            def forward(self):
                pass

        def sell():
            send(Till(), "open")

        def send(*given):
            pass
    """
    files = {"cli.py": MAIN, "stock.py": stock}
    assert check(tmp_path, files) == ["shop.stock.Till.open", "shop.stock.Till.forward"]
    assert check(tmp_path, files, by_name_calls=["send"], by_framework={"forward": "torch"}) == []


def test_exceptions_reach_what_is_below_them_and_are_refused_when_they_are_none(tmp_path):
    stock = "def sell():\n    pass\n\ndef later():\n    return deeper()\n\ndef deeper():\n    pass\n"
    files = {"cli.py": MAIN, "stock.py": stock}
    assert check(tmp_path, files, kept={"shop.stock:later": "next month"}) == []
    assert check(tmp_path, files, kept={"shop.stock:later": "r", "shop.stock:sell": "r", "shop.stock:gone": "r"}) == [
        "kept.shop.stock:sell: reached without this exception; remove it",
        "kept.shop.stock:gone: no such definition",
    ]
    unknown = {"entries": {"shop.stock:deeper": "r", "shop.old": "r"}, "by_framework": {"back*": "torch"}}
    assert check(tmp_path, files, **unknown) == [
        "shop.stock.later",
        "entries.shop.old: no such definition",
        "by_framework.back*: no definition has such a name",
    ]


def test_entry_points_are_scripts_pytest_plugins_and_main_modules(tmp_path):
    (tmp_path / "shop").mkdir()
    for name in ("__init__", "__main__", "cli", "plugin"):
        (tmp_path / "shop" / f"{name}.py").write_text("")
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[project.scripts]\nshop = "shop.cli:main"\n[project.entry-points.pytest11]\nshop = "shop.plugin"\n'
    )
    found = entry_points(read_packages({"shop": tmp_path / "shop"}), [project])
    assert sorted(found) == ["shop.__main__", "shop.cli:main", "shop.plugin"]


def test_every_exception_of_this_repository_has_a_reason():
    settings = read_settings(Path(main.__code__.co_filename).with_name("reachable.toml"))
    reasons = {**settings.entries, **settings.kept, **settings.by_framework}
    assert all(len(reason) > 3 for reason in reasons.values()), reasons


def test_a_fault_is_printed_with_its_place_and_ends_with_1(tmp_path, monkeypatch, capsys):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "cli.py").write_text("def main():\n    pass\n\n\ndef spare():\n    pass\n")
    (tmp_path / "pyproject.toml").write_text('[project.scripts]\nshop = "shop.cli:main"\n')
    (tmp_path / "r.toml").write_text(
        "by_name_calls = []\n[packages]\nshop = 'shop'\n[entries]\n[by_framework]\n[kept]\n"
    )
    monkeypatch.setattr("checks.reachable.ROOT", tmp_path)
    monkeypatch.setattr("checks.reachable.SETTINGS", tmp_path / "r.toml")
    assert main() == 1
    out, err = capsys.readouterr()
    assert out == "shop/cli.py:5: shop.cli.spare is reached by no entry point\n"
    assert err.startswith("1 found: wire each")
    (tmp_path / "shop" / "cli.py").write_text("def main():\n    pass\n")
    assert main() == 0

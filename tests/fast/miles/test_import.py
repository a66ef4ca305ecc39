"""`import miles` costs nothing, and its functions keep working whatever rooms are imported before or after."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import miles
from miles import api

ROOT = Path(__file__).resolve().parents[3]


def program(text: str) -> str:
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_brings_no_other_module() -> None:
    text = "import sys; before = set(sys.modules); import miles; dir(miles); import json; "
    text += "print(json.dumps([m for m in set(sys.modules) - before if m.startswith(('miles', 'numpy', 'pydantic', 'rich'))]))"
    assert json.loads(program(text)) == ["miles"]


def test_recipes_are_loaded_without_ray_or_torch() -> None:
    text = "import sys, miles; print(miles.load_recipe('recipes/quickstart.yaml', ['seed=3']).seed); "
    text += "print([name for name in ('ray', 'torch', 'transformers') if name in sys.modules])"
    assert program(text).split("\n") == ["3", "[]", ""]


@pytest.mark.parametrize("name", ["train", "evaluate"])
@pytest.mark.parametrize("before", ["", "import miles.train.backend, miles.evaluate.best; "])
def test_a_room_of_the_name_is_room_and_function(name: str, before: str) -> None:
    # Both functions refuse a text for a list of overrides.
    call = f"miles.{name}('recipes/quickstart.yaml', overrides='seed=1'" + (
        ", model='x')" if name == "evaluate" else ")"
    )
    text = f"import miles; {before}from miles.config import ConfigError\n"
    for _ in range(2):
        text += f"try:\n    {call}\nexcept ConfigError as error:\n    print(error)\nimport miles.train.config\n"
    said = 'overrides: is one text; write a list, ["seed=1"]'
    assert program(text).split("\n") == [said, said, ""]


def test_what_is_offered_is_what_the_interface_has() -> None:
    assert miles.__all__ == api.__all__
    assert {name for name in miles.__all__ if getattr(miles, name) is not getattr(api, name)} == {"train", "evaluate"}
    assert set(miles.__all__) <= set(dir(miles))
    with pytest.raises(AttributeError, match="has no attribute 'tran'"):
        miles.tran  # noqa: B018

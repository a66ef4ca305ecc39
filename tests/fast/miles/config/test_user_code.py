from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from miles.config import ConfigError, user_code

ONE = ("inputs",)


def written(folder: Path, text: str, name: str = "own.py") -> str:
    path = folder / name
    path.write_text(text)
    return f"python:{path}"


def test_a_function_is_found_in_a_module_and_in_a_file(tmp_path, monkeypatch):
    source = "def double(inputs):\n    return 2 * inputs\n"
    from_file = user_code.load(f"{written(tmp_path, source)}:double", option="o", parameters=ONE)
    assert from_file(3) == 6
    (tmp_path / "own_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert user_code.load("python:own_module:double", option="o", parameters=ONE)(3) == 6


def test_a_file_is_imported_once_and_what_it_defines_can_be_pickled(tmp_path):
    reference = written(
        tmp_path, "class Kept: ...\nmade = []\ndef make(inputs):\n    made.append(1)\n    return Kept()\n"
    )
    make = user_code.load(f"{reference}:make", option="a", parameters=ONE)
    kept = make(None)
    assert type(pickle.loads(pickle.dumps(kept))) is type(kept)
    again = user_code.load(f"{reference}:make", option="b", parameters=ONE)
    assert again is make


def test_two_files_of_one_name_are_two_modules(tmp_path):
    functions = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        reference = written(folder, f"def value(inputs):\n    return {number}\n")
        functions.append(user_code.load(f"{reference}:value", option="o", parameters=ONE))
    assert [function(None) for function in functions] == [1, 2]


@pytest.mark.parametrize(
    "text",
    ["python:", "python:json", "python:json:", "python:a-b:f", "python::f", "python:j.py:", "python:a:b:c", "a:b:c"],
)
def test_what_names_no_function_is_refused_with_both_forms(text):
    with pytest.raises(ConfigError, match=r"o: .* names no function; write it as path/to/file.py:function or"):
        user_code.load(text, option="o", parameters=ONE)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("def f(inputs:\n    pass\n", "SyntaxError"),
        ("raise RuntimeError('first; second')\n", "RuntimeError: first; second"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ],
)
def test_a_failing_import_is_one_error_with_the_users_traceback(tmp_path, source, said):
    reference = written(tmp_path, source)
    with pytest.raises(ConfigError, match=r"algo\.advantage: cannot import") as caught:
        user_code.load(f"{reference}:f", option="algo.advantage", parameters=ONE)
    text = str(caught.value)
    assert said in text
    assert f'File "{tmp_path}/own.py", line' in text
    assert "user_code.py" not in text
    assert "importlib" not in text
    # Nothing half-made stays: the mended file is read again.
    (tmp_path / "own.py").write_text("def f(inputs):\n    return 1\n")
    assert user_code.load(f"{reference}:f", option="algo.advantage", parameters=ONE)(None) == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("f = 3\n", "has no function f; define it there"),
        ("def g(inputs): ...\n", "has no function f"),
        ("def f(): ...\n", r"does not take \(inputs\): too many positional arguments; define f\(inputs\)"),
        ("def f(inputs, more): ...\n", r"does not take \(inputs\): missing a required argument: 'more'"),
        ("def f(*, inputs): ...\n", r"does not take \(inputs\)"),
        ("async def f(inputs): ...\n", "is a coroutine function"),
    ],
)
def test_a_function_of_another_form_is_refused_before_it_is_called(tmp_path, source, said):
    with pytest.raises(ConfigError, match=said):
        user_code.load(f"{written(tmp_path, source)}:f", option="o", parameters=ONE)


def test_a_function_with_defaults_or_any_arguments_is_taken(tmp_path):
    for name, head in (("a", "inputs, scale=1.0"), ("b", "*everything"), ("c", "inputs, **options")):
        reference = written(tmp_path, f"def f({head}):\n    return 7\n", f"{name}.py")
        assert user_code.load(f"{reference}:f", option="o", parameters=ONE)(None) == 7


def test_a_file_that_is_not_there_says_where_paths_begin(tmp_path):
    with pytest.raises(
        ConfigError, match=r"there is no file .*gone\.py; a relative path begins at the recipe's folder"
    ):
        user_code.load(f"python:{tmp_path}/gone.py:f", option="o", parameters=ONE)


def test_what_a_call_raises_names_option_function_and_line(tmp_path):
    reference = f"{written(tmp_path, 'def f(inputs):' + chr(10) + '    return 1 / inputs')}:f"
    function = user_code.load(reference, option="algo.loss", parameters=ONE)
    with pytest.raises(ConfigError, match=r"algo\.loss: .*:f raised ZeroDivisionError: division by zero") as caught:
        with user_code.running(reference, option="algo.loss"):
            function(0)
    assert 'own.py", line 2, in f' in str(caught.value)


def test_relative_files_begin_at_the_given_folder_and_nothing_else_changes(tmp_path):
    data = {
        "algo": {"advantage": "python:own/a.py:f", "loss": "python:pkg.module:g"},
        "list": ["python:b.py:h", 3, None, True],
        "description": "python: a language, see own.py:f",
        "kept": "python:/abs/c.py:f",
    }
    found = user_code.with_absolute_files(data, tmp_path)
    assert found["algo"] == {"advantage": f"python:{tmp_path}/own/a.py:f", "loss": "python:pkg.module:g"}
    assert found["list"] == [f"python:{tmp_path}/b.py:h", 3, None, True]
    assert (found["description"], found["kept"]) == (data["description"], data["kept"])
    assert user_code.source_files(found) == sorted([Path("/abs/c.py"), tmp_path / "b.py", tmp_path / "own" / "a.py"])


def test_the_file_behind_a_module_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "never_imported.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert user_code.source_files(["python:never_imported:f"]) == [tmp_path / "never_imported.py"]
    assert "never_imported" not in sys.modules
    assert user_code.source_files(["python:no_such_thing:f", "python:sys:exit"]) == []


def package_beside(folder: Path) -> None:
    package = folder / "beside"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "numbers.py").write_text("from . import scale\ndef value(inputs):\n    return scale.BY * inputs\n")
    (package / "scale.py").write_text("BY = 3\n")


def test_a_module_beside_the_recipe_is_its_file_with_or_without_the_prefix(tmp_path):
    package_beside(tmp_path)
    (tmp_path / "plain.py").write_text("")
    texts = ["beside.numbers:value", "python:beside.numbers:value", "plain:f", "json:loads", "beside.gone:f", "a b:c"]
    found = user_code.with_absolute_files(texts, tmp_path)
    assert found[:3] == [f"python:{tmp_path}/beside/numbers.py:value"] * 2 + [f"python:{tmp_path}/plain.py:f"]
    assert found[3:] == texts[3:]


def test_a_file_of_a_package_keeps_its_relative_imports(tmp_path):
    package_beside(tmp_path)
    value = user_code.load(f"python:{tmp_path}/beside/numbers.py:value", option="o", parameters=ONE)
    assert (value(2), value.__module__) == (6, "beside.numbers")


def test_a_package_name_that_is_taken_is_refused(tmp_path):
    (tmp_path / "json").mkdir()
    for name in ("__init__.py", "decoder.py"):
        (tmp_path / "json" / name).write_text("def f(inputs): ...\n")
    with pytest.raises(ConfigError, match=r"json\.decoder is .* already; give the package another name"):
        user_code.load(f"python:{tmp_path}/json/decoder.py:f", option="o", parameters=ONE)


def test_a_file_imports_those_beside_it_after_what_is_installed(tmp_path):
    (tmp_path / "only_here_7.py").write_text("VALUE = 7\n")
    (tmp_path / "yaml.py").write_text("raise RuntimeError('shadowed')\n")
    reference = written(tmp_path, "import only_here_7, yaml\ndef f(inputs):\n    return only_here_7.VALUE\n")
    assert user_code.load(f"{reference}:f", option="o", parameters=ONE)(None) == 7


def test_one_full_form_for_what_options_hold():
    assert user_code.full_reference("a.b:f") == user_code.full_reference("python:a.b:f") == "python:a.b:f"
    assert user_code.reference("grpo") == "grpo"
    assert user_code.is_reference("a.b:f")
    assert not user_code.is_reference("grpo")
    with pytest.raises(ValueError, match="names no function"):
        user_code.full_reference("grpo")

"""Strict YAML: what is read, what is refused, and where the message points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config import ConfigError
from miles.config.yaml_source import MAX_BYTES, Position, load_yaml, parse_scalar, parse_yaml

REFUSED = {
    "a: 1\nb: 2\na: 3\n": r"f\.yaml:3:1: key 'a' is given twice; keep one",
    "a:\n  b: 1\n  b: 1\n": r"f\.yaml:3:3: key 'b' is given twice",
    "a:\n\tb: 1\n": r"f\.yaml:2:1: a tab is used for indentation; use spaces",
    "a: &x 1\nb: *x\n": r"f\.yaml:1:4: anchors and aliases hide where a value comes from; write the value out",
    "a: &x 1\n": r"f\.yaml:1:4: anchors",
    "a: !!str 1\n": r"f\.yaml:1:4: tag tag:yaml\.org,2002:str is not read; remove it",
    "a: !!python/object:os.system x\n": r"f\.yaml:1:4: tag .*python/object",
    "<<: {a: 1}\n": r"f\.yaml:1:1: keys must be plain words",
    "? [1]\n: 2\n": r"f\.yaml:1:3: keys must be plain words",
    "a: yes\n": r"f\.yaml:1:4: 'yes' is ambiguous; write true or false, or quote it",
    "a: [1, No]\n": r"f\.yaml:1:8: 'No' is ambiguous",
    "a: [1, 2\nb: 3\n": r"f\.yaml:2:\d+: not valid YAML",
    "a: b: c\n": r"f\.yaml:1:5: not valid YAML: mapping values are not allowed",
    "a: 'x\n": r"f\.yaml:2:1: not valid YAML",
    "a: \x00\n": r"f\.yaml: not valid YAML: unacceptable character",
    "a: 1\n---\nb: 2\n": r"f\.yaml:2:1: not valid YAML: but found another document",
    "- 1\n- 2\n": r"f\.yaml:1:1: the file must hold a mapping",
    "just text\n": r"f\.yaml:1:1: the file must hold a mapping",
    "": r"f\.yaml: the file is empty; it must hold a mapping",
    "# only a comment\n": r"f\.yaml: the file is empty",
    "a: 1e999\n": r"f\.yaml:1:4: 1e999 is out of range",
    f"a: {'9' * 5000}\n": r"f\.yaml:1:4: 9{40} is out of range",
    "a: " + "[" * 5000 + "\n": r"f\.yaml: nested too deeply",
}


@pytest.mark.parametrize("text", REFUSED, ids=[repr(text[:18]) for text in REFUSED])
def test_what_yaml_would_guess_about_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[text]) as raised:
        parse_yaml(text, name="f.yaml")
    assert raised.value.exit_code == 2


SCALARS = {
    "2e-3": 0.002,
    "2.0e-3": 0.002,
    "1E5": 1e5,
    ".5": 0.5,
    "1.": 1.0,
    "-7": -7,
    "+3": 3,
    "0": 0,
    "true": True,
    "false": False,
    "null": None,
    "~": None,
    "": None,
    "True": "True",
    "'yes'": "yes",
    '"1"': "1",
    "007": 7.0,
    "0x10": "0x10",
    "1_000": "1_000",
    "12:30": "12:30",
    "2026-01-02": "2026-01-02",
    ".nan": ".nan",
    "word": "word",
    # A value of several settings, never a boolean here.
    "off": "off",
    "[1, 2e1, x]": [1, 20.0, "x"],
    "{a: 1}": {"a": 1},
}


@pytest.mark.parametrize("text", SCALARS)
def test_plain_values_have_one_meaning(text: str) -> None:
    value = parse_scalar(text)
    assert value == SCALARS[text]
    assert type(value) is type(SCALARS[text])


def test_positions_count_from_one_and_follow_nesting_and_lists() -> None:
    document = parse_yaml("a:\n  b:\n    - x: 1\n    - x: 2\nc: 3\n", name="f.yaml")
    assert document.data == {"a": {"b": [{"x": 1}, {"x": 2}]}, "c": 3}
    assert document.locate(("a", "b", 1, "x")) == Position("f.yaml", 4, 7)
    assert str(document.locate(("c",))) == "f.yaml:5:1"
    assert document.locate(("a", "b", 1, "absent", "deeper")) == Position("f.yaml", 4, 7)
    assert document.locate(("absent",)) == Position("f.yaml", 1, 1)


def test_byte_order_mark_and_windows_newlines_change_nothing(tmp_path: Path) -> None:
    text = "a: 1\nb:\n  c: text\n"
    (tmp_path / "plain.yaml").write_bytes(text.encode())
    (tmp_path / "windows.yaml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    plain, windows = load_yaml(tmp_path / "plain.yaml"), load_yaml(tmp_path / "windows.yaml")
    assert windows.data == plain.data == {"a": 1, "b": {"c": "text"}}
    assert windows.positions[("b", "c")].line == 3


def test_file_that_is_not_utf8_is_refused_at_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: é\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: byte 6 is not UTF-8; save the file as UTF-8"):
        load_yaml(path)


def test_file_above_the_size_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"a: 1\n" + b"#" * MAX_BYTES)
    with pytest.raises(ConfigError, match=rf"{MAX_BYTES + 5} bytes; a configuration file may have at most {MAX_BYTES}"):
        load_yaml(path)


def test_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match=r"quickstrat\.yaml: no such file; did you mean .*/quickstart\.yaml\?"):
        load_yaml(tmp_path / "quickstrat.yaml")
    with pytest.raises(ConfigError, match=r"no such file \(folder .*nowhere does not exist\)"):
        load_yaml(tmp_path / "nowhere" / "x.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_yaml(tmp_path)


# Text that looks like YAML more often than random characters do.
PIECES = st.sampled_from(
    [
        "a",
        "b: ",
        "- ",
        "\n",
        "  ",
        "\t",
        "'",
        '"',
        "[",
        "]",
        "{",
        "}",
        ",",
        "#",
        "&x ",
        "*x",
        "!t ",
        "|\n",
        ": ",
        "1",
        "é",
    ]
)


@given(st.lists(PIECES, max_size=25).map("".join))
def test_any_text_gives_plain_json_data_or_a_config_error(text: str) -> None:
    try:
        document = parse_yaml(text, name="f.yaml")
    except ConfigError as error:
        message = str(error)
    else:
        message = f"f.yaml: {json.dumps(document.data, allow_nan=False)}"
    assert message.startswith("f.yaml")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e6, 1e6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1, max_size=6).filter(lambda key: key != "<<"), JSON, min_size=1, max_size=4))
def test_json_is_read_back_as_it_was(data: dict) -> None:
    text = json.dumps(data)
    if any(ord(char) > 0xFFFF for char in json.dumps(data, ensure_ascii=False)):
        return  # JSON writes such characters as surrogate pairs, which YAML does not join
    assert parse_yaml(text, name="f.yaml").data == data

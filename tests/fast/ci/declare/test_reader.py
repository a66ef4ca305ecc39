"""The AST reader: what a valid declaration becomes, and every way of writing one that it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_ci.declare import scan
from miles_ci.declare.model import Declaration, Exemption
from miles_ci.declare.reader import read_source

IMPORTS = "from miles_ci.declare import register_cpu_ci, register_cuda_ci, register_rocm_ci, register_metric_bound\n"
GPU = '"stage-b-1-gpu-h200", hardware=["h200"], labels=["kernels"]'
EXEMPT = '{"reason": "fails on the new driver", "issue": "#12", "until": "2026-12-24"}'


def read(source: str):
    return read_source("tests/e2e/test_x.py", (IMPORTS + source).encode())


def codes(source: str) -> list[str]:
    return [error.code for error in read(source).errors]


def only(source: str) -> Declaration:
    found = read(source)
    assert found.errors == ()
    assert len(found.declarations) == 1
    return found.declarations[0]


def test_every_field_of_a_gpu_declaration_is_read() -> None:
    found = only(
        f'register_rocm_ci(12.5, "s", hardware=["mi300x", "cdna4"], num_gpus=4, min_memory_gib=100,\n'
        f'    capabilities=["fp8_fnuz"], labels=["megatron"], nightly=True, disabled={EXEMPT}, unstable={EXEMPT},\n'
        '    timeout=900, split=True, serial=True, allow_all_skipped={"reason": "needs a licence server"}, owner="x y")'
    )
    exemption = Exemption("fails on the new driver", "#12", "2026-12-24")
    assert (found.backend, found.est_time, found.suite) == ("rocm", 12.5, "s")
    assert (found.hardware, found.num_gpus, found.min_memory_gib) == (("mi300x", "cdna4"), 4, 100.0)
    assert (found.capabilities, found.labels, found.nightly) == (("fp8_fnuz",), ("megatron",), True)
    assert (found.disabled, found.unstable, found.timeout) == (exemption, exemption, 900.0)
    assert (found.split, found.serial, found.owner) == (True, True, "x y")
    assert found.allow_all_skipped == "needs a licence server"
    assert (found.line, found.column) == (2, 1)


def test_keyword_and_positional_forms_mean_the_same() -> None:
    by_place, by_name = only('register_cpu_ci(3, "s")'), only('register_cpu_ci(suite="s", est_time=3)')
    assert (by_place.est_time, by_place.suite) == (by_name.est_time, by_name.suite) == (3.0, "s")


def test_none_means_not_given() -> None:
    assert only('register_cpu_ci(3, "s", disabled=None, timeout=None)').disabled is None


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ('0, "s"', "out-of-range"),
        ('-1, "s"', "out-of-range"),
        ('1e999, "s"', "out-of-range"),
        ('True, "s"', "wrong-type"),
        ('"3", "s"', "wrong-type"),
        ("3, 4", "wrong-type"),
        ('3, ""', "bad-value"),
        ("3", "missing-field"),
        ('3, "s", "x"', "too-many-arguments"),
        ('3, "s", suite="s"', "duplicate-field"),
        ('3, "s", lables=["a"]', "unknown-field"),
        ('3, "s", hardware=["h200"]', "forbidden-field"),
        ('3, "s", num_gpus=1', "forbidden-field"),
        ('3, "s", labels="kernels"', "wrong-type"),
        ('3, "s", labels=[1]', "wrong-type"),
        ('3, "s", labels=["a", "a"]', "duplicate-name"),
        ('3, "s", nightly=1', "wrong-type"),
        ('3, "s", timeout=0', "out-of-range"),
        ('3, "s", owner="a\\nb"', "bad-value"),
        ('3, "s", split="yes"', "wrong-type"),
        ('3, "s", disabled={}', "bad-exemption"),
        ('3, "s", disabled="broken since Monday"', "bad-exemption"),
        ('3, "s", disabled={"reason": "too short", "issue": "#1", "until": "2026-12-24"}', "bad-exemption"),
        ('3, "s", disabled={"reason": "long enough reason", "issue": "1", "until": "2026-12-24"}', "bad-exemption"),
        ('3, "s", disabled={"reason": "long enough reason", "issue": "#1", "until": "24.12.2026"}', "bad-exemption"),
        ('3, "s", disabled={"reason": "long enough reason", "issue": "#1", "until": "2026-02-30"}', "bad-exemption"),
        ('3, "s", unstable={"reason": "long enough reason", "issue": "#1"}', "bad-exemption"),
        ('3, "s", unstable={"reason": "long enough reason", "isue": "#1", "until": "2026-12-24"}', "bad-exemption"),
        ('3, "s", allow_all_skipped={"reason": "short"}', "bad-exemption"),
        ('3, "s", allow_all_skipped=True', "bad-exemption"),
    ],
)
def test_a_wrong_value_is_refused(arguments: str, code: str) -> None:
    assert codes(f"register_cpu_ci({arguments})") == [code]


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ("num_gpus=True", "wrong-type"),
        ("num_gpus=0", "out-of-range"),
        ("num_gpus=1.0", "wrong-type"),
        ("min_memory_gib=0", "out-of-range"),
        ("capabilities=['fp8', 'fp8']", "duplicate-name"),
    ],
)
def test_a_wrong_gpu_value_is_refused(extra: str, code: str) -> None:
    assert codes(f"register_cuda_ci(3, {GPU}, {extra})") == [code]


def test_a_gpu_declaration_needs_hardware() -> None:
    assert codes('register_cuda_ci(3, "s", labels=["a"])') == ["missing-field"]
    assert codes('register_cuda_ci(3, "s", hardware=[], labels=["a"])') == ["empty-list"]


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("register_cpu_ci(TIME, 's')", "the name 'TIME'"),
        ("register_cpu_ci(3, f's')", "an f-string"),
        ("register_cpu_ci(3, 's' + 'x')", "a concatenation"),
        ("register_cpu_ci(3 * 60, 's')", "an arithmetic expression"),
        ("register_cpu_ci(int('3'), 's')", "a call of 'int'"),
        ("register_cpu_ci(time.limit, 's')", "an attribute"),
        ("register_cpu_ci(LIMITS[0], 's')", "a subscript"),
        ("register_cpu_ci(3 if X else 4, 's')", "a conditional expression"),
        ("register_cpu_ci(3, 's', labels=[x for x in y])", "a comprehension"),
        ("register_cpu_ci(3, 's', labels=[*BASE])", "a starred expression"),
        ("register_cpu_ci(3, 's', labels={'a'})", "a set"),
        ("register_cpu_ci(*ARGS)", "a starred argument"),
        ("register_cpu_ci(3, 's', **MORE)", "a ** argument"),
        ("register_cpu_ci(3, 's', disabled={**BASE})", "a ** unpacking"),
        ("register_cpu_ci(3, b's')", "the literal b's'"),
    ],
)
def test_what_is_no_literal_is_refused_and_named(source: str, named: str) -> None:
    found = read(source)
    assert [error.code for error in found.errors if error.code == "not-literal"] == ["not-literal"]
    assert named in "".join(error.message for error in found.errors)


@pytest.mark.parametrize(
    ("source", "code", "named"),
    [
        ("if True:\n    register_cpu_ci(3, 's')", "nested-call", "inside `if`"),
        ("def f():\n    register_cpu_ci(3, 's')", "nested-call", "inside function `f`"),
        ("class C:\n    register_cpu_ci(3, 's')", "nested-call", "inside class `C`"),
        ("try:\n    register_cpu_ci(3, 's')\nexcept ImportError:\n    pass", "nested-call", "inside `try`"),
        ("for s in 'ab':\n    register_cpu_ci(3, s)", "nested-call", "inside `for`"),
        ("with open('x'):\n    register_cpu_ci(3, 's')", "nested-call", "inside `with`"),
        ("x = register_cpu_ci(3, 's')", "nested-call", "inside an assignment"),
        ("[register_cpu_ci(3, 's')]", "nested-call", "inside another expression"),
        ("print(register_cpu_ci(3, 's'))", "nested-call", "inside another expression"),
        ("f = lambda: register_cpu_ci(3, 's')", "nested-call", "inside a lambda"),
        (
            "import miles_ci.declare\nci.declare.register_cpu_ci(3, 's')",
            "attribute-call",
            "attribute call of register_cpu_ci",
        ),
        ("from miles_ci.declare import register_cpu_ci as r\nr(3, 's')", "aliased-import", "`register_cpu_ci as r`"),
        ("from miles_ci.declare import *", "star-import", "import *"),
        ("from miles_ci.declare import register_ci_gate", "unknown-import", "called register_metric_bound now"),
        ("from miles_ci.declare import register_cpu", "unknown-import", "did you mean 'register_cpu_ci'?"),
        ("def f():\n    from miles_ci.declare import register_cpu_ci", "nested-import", "inside function `f`"),
        ("def register_cpu_ci(a, b):\n    pass", "shadowed", "defined here"),
        ("again = register_cpu_ci\nagain(1, 's')", "hidden-use", "read without being called"),
        ("[f(1, 's') for f in [register_cpu_ci]]", "hidden-use", "read without being called"),
        ("again = again or register_cpu_ci", "hidden-use", "read without being called"),
        ("functools.partial(register_cpu_ci, 1)('s')", "hidden-use", "read without being called"),
        ("def f(call=register_cpu_ci):\n    call(1, 's')", "hidden-use", "read without being called"),
        ("@register_cpu_ci\ndef f():\n    pass", "hidden-use", "read without being called"),
        ("register_cpu_ci = print", "hidden-use", "bound to something else"),
        ("import miles_ci.declare as d\nagain = d.register_cpu_ci", "hidden-use", "read as an attribute"),
        ("d.register_cpu_ci = print", "hidden-use", "replaced"),
        ("getattr(miles_ci.declare, 'register_cpu_ci')(1, 's')", "hidden-use", "looked up by its name"),
        ("operator.attrgetter('register_cpu_ci')(d)(1, 's')", "hidden-use", "looked up by its name"),
        ("globals()['register_cpu_ci'](1, 's')", "hidden-use", "looked up by its name"),
        ("vars(d).get('register_cpu_ci')(1, 's')", "hidden-use", "looked up by its name"),
        ("d.__dict__['register_cpu_ci'](1, 's')", "hidden-use", "looked up by its name"),
        ("from helpers import register_cpu_ci as again\nagain(1, 's')", "aliased-import", "`register_cpu_ci as again`"),
    ],
)
def test_a_call_the_reader_could_miss_is_refused_and_named(source: str, code: str, named: str) -> None:
    found = read(source)
    assert code in [error.code for error in found.errors]
    assert named in " ".join(error.message for error in found.errors)


def test_a_call_without_import_is_refused() -> None:
    found = read_source("tests/e2e/test_x.py", b'register_cpu_ci(3, "s")\n')
    assert [error.code for error in found.errors] == ["not-imported"]


def test_mentions_in_strings_and_comments_are_not_calls() -> None:
    found = read('# register_cuda_ci(1, "x")\nTEXT = "register_cuda_ci(1)"\nregister_cpu_ci(3, "s")')
    assert found.errors == ()
    assert len(found.declarations) == 1


def test_a_hidden_use_is_placed_and_reported_once() -> None:
    found = read('register_cpu_ci(3, "s")\nagain = register_cpu_ci\nagain(1, "t")')
    assert [(error.line, error.column, error.code) for error in found.errors] == [(3, 9, "hidden-use")]
    assert read('register_cpu_ci(3, "s")\nTABLE = {"register_cpu_ci": 1}\nTABLE.get("register_cpu_ci")').errors == ()


def test_two_suites_are_legal_and_the_same_pair_twice_is_not() -> None:
    assert len(read('register_cpu_ci(3, "s")\nregister_cpu_ci(3, "t")').declarations) == 2
    found = read('register_cpu_ci(3, "s")\nregister_cpu_ci(4, "s")')
    assert [(error.code, error.line) for error in found.errors] == [("duplicate-registration", 3)]
    assert "first in line 2" in found.errors[0].message


def test_an_error_points_at_line_and_character_of_the_value() -> None:
    found = read('"é"; X = "ü"\nregister_cpu_ci(3, "ö" and "s", labels=[1])')
    assert [(error.line, error.column) for error in found.errors] == [(3, 20), (3, 40)]


def test_all_errors_of_a_call_are_reported_together() -> None:
    assert codes("register_cuda_ci(0, X, hardwar=[], labels=3)") == [
        "missing-field",
        "out-of-range",
        "not-literal",
        "unknown-field",
        "wrong-type",
    ]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ('"loss", rel_up=0.1', "missing-field"),
        ('"loss", abs_down=0.1', "missing-field"),
        ("rel_up=0.1, rel_down=0.1", "missing-field"),
        ('"loss", rel_up=-0.1, rel_down=0.1', "out-of-range"),
        ('"loss", rel_up=0.1, rel_down=0.1, steps="first"', "bad-value"),
        ('"loss", rel_up=0.1, rel_down=0.1, steps=[]', "wrong-type"),
        ('"loss", rel_up=0.1, rel_down=0.1, steps=[1, 1]', "duplicate-name"),
        ('"loss", rel_up=0.1, rel_down=0.1, steps=[True]', "wrong-type"),
        ('"loss", rel_up=0.1, rel_down=0.1, warmup=0', "out-of-range"),
        ('"loss", rel_up=0.1, rel_down=0.1, limit=0', "out-of-range"),
        ('"loss", rel_up=0.1, rel_down=0.1, magnitude="yes"', "wrong-type"),
    ],
)
def test_a_bound_needs_both_sides_and_sound_bounds(arguments: str, code: str) -> None:
    assert codes(f"register_metric_bound({arguments})") == [code]


def test_the_digest_of_a_bound_changes_with_its_bounds_and_not_with_its_line() -> None:
    bound = 'register_metric_bound("kl", rel_up=0.1, abs_down=1e-8, steps=[1, 5])'
    first, moved = read(bound).metric_bounds[0], read("\n\n" + bound).metric_bounds[0]
    other = read(bound.replace("0.1", "0.2")).metric_bounds[0]
    assert first.digest == moved.digest != other.digest
    assert (first.rel_up, first.abs_up, first.abs_down, first.steps) == (0.1, 0.0, 1e-8, (1, 5))


@pytest.mark.parametrize(
    ("data", "code", "place"),
    [
        (b"from miles_ci.declare import register_cpu_ci\nx = '\xff'\n", "not-utf8", (2, 6)),
        (b"from miles_ci.declare import register_cpu_ci\ndef f(:\n", "syntax-error", (2, 7)),
        (b"register_cpu_ci\0", "syntax-error", (1, 1)),
        (b"register_cpu_ci" + b"(" * 5000, "syntax-error", (1, 1)),
    ],
)
def test_an_unreadable_file_is_one_error(data: bytes, code: str, place: tuple[int, int]) -> None:
    errors = read_source("tests/e2e/test_x.py", data).errors
    assert [error.code for error in errors] == [code]
    if len(data) < 1000:
        assert (errors[0].line, errors[0].column) == place


@pytest.mark.parametrize("newline", [b"\r\n", b"\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_byte_order_mark_and_line_ends_do_not_matter(newline: bytes, mark: bytes) -> None:
    data = mark + newline.join([b"from miles_ci.declare import register_cpu_ci", b'register_cpu_ci(3, "s")', b""])
    found = read_source("tests/e2e/test_x.py", data)
    assert found.errors == ()
    assert (found.declarations[0].line, found.declarations[0].column) == (2, 1)


def test_the_declaration_module_imports_fast_and_needs_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import miles_ci.declare; "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    root = Path(__file__).resolve().parents[4] / "ci"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['__future__', 'miles_ci']"


def test_the_registration_functions_do_nothing() -> None:
    import miles_ci.declare

    for name in ("register_cpu_ci", "register_cuda_ci", "register_rocm_ci", "register_metric_bound"):
        required = ("kl",) if name == "register_metric_bound" else (3, "any")
        assert getattr(miles_ci.declare, name)(*required) is None


def test_scan_of_a_missing_tree_is_empty(tmp_path: Path) -> None:
    found = scan(tmp_path)
    assert (found.declarations, found.errors, found.files) == ((), (), ())


def test_items_that_need_not_run_are_named_with_their_reasons() -> None:
    found = only(
        'register_cpu_ci(3, "s", allow_never_executed={"test_b": "needs a second host", "T::test_a[1]": "needs a licence here"})'
    )
    assert found.allow_never_executed == (("T::test_a[1]", "needs a licence here"), ("test_b", "needs a second host"))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("{}", "bad-exemption"),
        ("[]", "bad-exemption"),
        ('["test_a"]', "bad-exemption"),
        ('{"test_a": "short"}', "bad-exemption"),
        ('{"test_a": 3}', "bad-exemption"),
        ('{3: "a reason of some length"}', "not-literal"),
        ('{"": "a reason of some length"}', "bad-value"),
        ('{"tests/e2e/test_x.py::test_a": "a reason of some length"}', "bad-exemption"),
    ],
)
def test_an_allowance_without_item_or_reason_is_refused(value: str, code: str) -> None:
    assert codes(f'register_cpu_ci(3, "s", allow_never_executed={value})') == [code]

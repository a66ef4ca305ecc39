"""Tests that never run are found in the source; tests that do run are left in peace."""

from __future__ import annotations

import textwrap

import pytest

from miles_ci.plan.model import Unit
from miles_ci.run.judge import never_executed
from miles_ci.run.judge.pytest_events import FileEvidence, Item


def find(source: str, *collected: str) -> list[str]:
    nodes = [f"tests/fast/test_x.py::{name}" for name in collected]
    return [f"{each.what}: {each.reason}" for each in never_executed.find(textwrap.dedent(source), nodes)]


def test_ordinary_file_has_no_never_executed_test():
    source = """
        import pytest, unittest
        @pytest.mark.parametrize("n", [1, 2])
        def test_a(n): assert n
        class TestB:
            def test_c(self): assert 1
            class TestInner:
                def test_d(self): assert 1
        class Case(unittest.TestCase):
            def test_e(self): self.assertTrue(1)
        def testing_helper(): pass
        @pytest.fixture
        def test_data(): return 1
    """
    assert find(source, "test_a[1]", "test_a[2]", "TestB::test_c", "TestB::TestInner::test_d", "Case::test_e") == []


def test_141_dead_test_cases_under_a_custom_main_are_all_named():
    methods = "\n".join(f"        def test_{n}(self): self.assertTrue(False)" for n in range(141))
    source = (
        f"import unittest\ndef test_alive(): assert 1\ndef main():\n    class Case(unittest.TestCase):\n{methods}\n"
    )
    assert len(find(source, "test_alive")) == 141


def test_classes_inside_a_main_guard_are_dark():
    source = """
        import unittest
        def test_alive(): assert 1
        if __name__ == "__main__":
            class Case(unittest.TestCase):
                def test_dead(self): self.fail()
            unittest.main()
    """
    (found,) = find(source, "test_alive")
    assert found.startswith("Case::test_dead: defined inside")


def test_class_with_a_constructor_is_not_collected_and_therefore_dark():
    source = """
        def test_alive(): assert 1
        class TestX:
            def __init__(self): pass
            def test_dead(self): assert 0
    """
    assert find(source, "test_alive") == ["TestX::test_dead: not collected by pytest"]


def test_name_defined_twice_hides_the_first():
    source = """
        def test_a(): assert 0
        def test_a(): assert 1
    """
    (found,) = find(source, "test_a")
    assert "defined again below" in found


def test_inherited_tests_of_a_base_class_in_the_same_file_are_alive():
    source = """
        import unittest
        class TestBase:
            __test__ = False
            def test_shared(self): assert 1
        class Middle(TestBase): pass
        class TestOne(Middle):
            __test__ = True
    """
    assert find(source, "TestOne::test_shared") == []
    assert find(source, "TestOne::test_other") == ["TestBase::test_shared: not collected by pytest"]


def test_either_branch_of_an_import_time_condition_may_hold_the_tests():
    source = """
        import sys
        if sys.platform == "linux":
            def test_a(): assert 1
        try:
            import torch
        except ImportError:
            torch = None
        else:
            def test_b(): assert 1
    """
    assert find(source, "test_a", "test_b") == []


def test_swallowed_pytest_main_is_named_and_a_used_one_is_not():
    swallowed = """
        import pytest
        def test_all():
            pytest.main(["elsewhere"])
            assert True
    """
    used = """
        import sys, pytest
        def test_a(): assert 1
        if __name__ == "__main__":
            sys.exit(pytest.main([__file__]))
    """
    (found,) = find(swallowed, "test_all")
    assert found.startswith("pytest.main: its result is thrown away")
    assert find(used, "test_a") == []


@pytest.mark.parametrize(
    "lines",
    [
        "rc = pytest.main([__file__]); print(rc)",
        "rc: int = pytest.main([__file__])",
        "rc = pytest.main([__file__]); print(f'ended with {rc}', file=sys.stderr)",
        "rc = pytest.main([__file__]); rc",
        "print(pytest.main([__file__]))",
        "run = pytest.main; run([__file__])",
        "run = pytest.main; rc = run([__file__])",
        "from pytest import main; main([__file__])",
        "from pytest import main as go; go([__file__])",
        "import pytest as pt; pt.main([__file__])",
    ],
)
def test_the_result_of_pytest_main_is_thrown_away_under_any_name(lines):
    source = f"import sys, pytest\ndef test_a(): assert 1\nif __name__ == '__main__':\n    {lines}\n"
    (found,) = find(source, "test_a")
    assert found.startswith("pytest.main: its result is thrown away")


@pytest.mark.parametrize(
    "lines",
    [
        "rc = pytest.main([__file__]); print(rc); sys.exit(rc)",
        "run = pytest.main; sys.exit(run([__file__]))",
        "from pytest import main; raise SystemExit(main([__file__]))",
        "rc = pytest.main([__file__]); assert rc == 0",
        "main = print; main('done')",
        "codes = [pytest.main([__file__])]; sys.exit(max(codes))",
    ],
)
def test_a_result_of_pytest_main_that_is_judged_is_none_of_them(lines):
    source = f"import sys, pytest\ndef test_a(): assert 1\nif __name__ == '__main__':\n    {lines}\n"
    assert find(source, "test_a") == []


def test_file_in_which_nothing_is_checked_cannot_fail():
    (found,) = find("def test_prints(): print(1 + 1)", "test_prints")
    assert "cannot fail" in found


def test_checks_in_their_usual_forms_count():
    for check in (
        "assert 1",
        "raise RuntimeError",
        "np.testing.assert_allclose(1, 1)",
        "with pytest.raises(ValueError): pass",
        "subprocess.run(['x'], check=True)",
        "subprocess.check_call(['x'])",
        "verify_layout(1)",
        "mock.assert_called_once()",
    ):
        assert find(f"def test_a():\n    {check}", "test_a") == [], check


def test_parts_of_a_split_file_count_as_alive():
    assert find("def test_a(): assert 1\ndef test_b(): assert 1", "test_a", "test_b") == []


@pytest.mark.parametrize(
    "base",
    [
        "import unittest\nclass TestA(unittest.TestCase):",
        "import unittest as u\nclass A(u.TestCase):",
        "from unittest import TestCase as Case\nclass A(Case):",
        "import unittest\nBase = unittest.TestCase\nclass TestA(Base):",
        "import unittest\nclass Common(unittest.TestCase): pass\nclass A(Common):",
        "import unittest\nfrom x import Mixin\nclass A(Mixin, unittest.TestCase):",
    ],
)
@pytest.mark.parametrize("decorator", ["", "@pytest.mark.asyncio\n    ", "@mock.patch('os.getcwd')\n    "])
def test_a_coroutine_in_a_plain_test_case_is_collected_and_never_awaited(base, decorator):
    name = "TestA" if "class TestA" in base else "A"
    source = f"{base}\n    {decorator}async def test_co(self): assert 1 == 2\n    def test_b(self): assert 1\n"
    (found,) = find(source, f"{name}::test_co", f"{name}::test_b")
    assert found.startswith(f"{name}::test_co: a coroutine that unittest never awaits")


@pytest.mark.parametrize(
    "base",
    [
        "import unittest\nclass TestA(unittest.IsolatedAsyncioTestCase):",
        "from unittest import IsolatedAsyncioTestCase as Case, TestCase\nclass TestA(Case, TestCase):",
        "from django.test import TestCase\nclass TestA(TestCase):",
        "from x import AsyncMixin\nimport unittest\nclass TestA(AsyncMixin, unittest.TestCase):",
        "import unittest\nclass C(unittest.TestCase):\n    def run(self, r): go(self, r)\nclass TestA(C):",
        "class TestA:",
    ],
)
def test_a_coroutine_that_something_may_await_is_left_in_peace(base):
    assert find(f"{base}\n    async def test_co(self): assert 1\n", "TestA::test_co") == []


def test_a_decorator_that_may_run_or_skip_a_coroutine_is_believed():
    for decorator in ("gen_test", "async_to_sync", "unittest.skip('x')", "pytest.mark.skipif(True, reason='x')"):
        source = (
            f"import unittest\nclass A(unittest.TestCase):\n    @{decorator}\n    async def test_co(self): assert 1\n"
        )
        assert find(source, "A::test_co") == [], decorator


def test_a_generator_in_a_test_case_never_runs():
    for kind in ("TestCase", "IsolatedAsyncioTestCase"):
        source = f"import unittest\nclass A(unittest.{kind}):\n    def test_a(self):\n        yield\n        assert 0\n"
        (found,) = find(source, "A::test_a")
        assert "a generator" in found
    inner = "import unittest\nclass A(unittest.TestCase):\n    def test_a(self):\n        def g(): yield 1\n        assert g\n"
    assert find(inner, "A::test_a") == []


def test_an_inherited_coroutine_is_never_executed_in_the_class_that_does_not_await():
    source = """
        import unittest
        class Shared:
            async def test_co(self): assert 1
        class TestA(Shared, unittest.IsolatedAsyncioTestCase): pass
        class TestB(Shared, unittest.TestCase): pass
    """
    (found,) = find(source, "TestA::test_co", "TestB::test_co")
    assert found.startswith("Shared::test_co: a coroutine")


@pytest.mark.parametrize("name", ["AddTests", "SumTest", "testSum", "sum_tests", "Addition"])
def test_a_class_of_a_name_that_pytest_does_not_look_at_is_dark(name):
    source = f"def test_alive(): assert 1\nclass {name}:\n    def test_sum(self): assert 0\n"
    (found,) = find(source, "test_alive")
    assert found.startswith(f"{name}::test_sum: not collected by pytest, which looks at classes named Test*")


def test_a_class_that_python_classes_makes_pytest_collect_is_alive():
    source = (
        "class AddTests:\n    def test_sum(self): assert 1\n    class MoreTests:\n        def test_b(self): assert 1\n"
    )
    assert find(source, "AddTests::test_sum", "AddTests::MoreTests::test_b") == []
    (found,) = find(source, "AddTests::test_sum")
    assert found.startswith("AddTests::MoreTests::test_b")


def test_a_class_that_serves_the_tests_is_none_of_them():
    source = """
        class FakeServer:
            def test_connection(self): return True
        class Shared:
            def test_b(self): assert 1
        class TestOne(Shared): pass
        def test_a(): assert FakeServer().test_connection()
    """
    assert find(source, "test_a", "TestOne::test_b") == []


@pytest.mark.parametrize(
    "block",
    [
        "if True:\n    pass\nelse:\n    {}",
        "if True:\n    pass\nelif True:\n    {}",
        "if __name__ == '__main__':\n    pass\nelse:\n    {}",
        "try:\n    pass\nexcept ImportError:\n    {}",
        "try:\n    raise ValueError\nexcept ValueError:\n    pass\nelse:\n    {}",
        "try:\n    pass\nexcept* ImportError:\n    {}",
        "try:\n    pass\nfinally:\n    {}",
        "match 1:\n    case 2:\n        {}",
        "for x in ():\n    {}",
        "for x in (1,):\n    break\nelse:\n    {}",
        "while False:\n    {}",
        "with x:\n    if y:\n        {}",
    ],
)
def test_a_test_in_a_branch_that_did_not_run_is_never_executed_and_one_that_did_is_not(block):
    method = "class TestX:\n" + " " * 12 + "def test_y(self): assert 0"
    for test, node in (("def test_x(): assert 0", "test_x"), (method, "TestX::test_y")):
        source = f"def test_alive(): assert 1\n{block.format(test)}\n"
        (dead,) = find(source, "test_alive")
        assert dead.startswith(f"{node}: not collected by pytest: its branch did not run")
        assert find(source, "test_alive", node) == []


def test_a_test_in_a_branch_of_a_class_is_seen():
    source = (
        "class TestX:\n    if y:\n        def test_a(self): assert 1\n    else:\n        def test_b(self): assert 1\n"
    )
    (found,) = find(source, "TestX::test_a")
    assert found.startswith("TestX::test_b")


@pytest.mark.parametrize(
    "source",
    [
        "if x:\n    def test_a(): assert 1\nelse:\n    def test_a(): assert 1",
        "if x:\n    def test_a(): assert 1\nelif y:\n    def test_a(): assert 1",
        "try:\n    def test_a(): assert 1\nexcept E:\n    def test_a(): assert 1",
        "match x:\n    case 1:\n        def test_a(): assert 1\n    case _:\n        def test_a(): assert 1",
    ],
)
def test_one_name_in_two_branches_is_one_test(source):
    assert find(source, "test_a") == []
    twice = source.replace("def test_a(): assert 1", "class TestA: \n            def test_a(self): assert 1")
    assert find(twice, "TestA::test_a") == []


def test_a_class_defined_twice_hides_the_first():
    source = """
        class TestA:
            def test_a(self): assert 0
        class TestA:
            def test_a(self): assert 1
    """
    (found,) = find(source, "TestA::test_a")
    assert found.startswith("TestA: defined again below")


def unit(**fields):
    return Unit("t.py", "t.py", "s", "test", 1, "declared", 0, 9, **fields)


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({}, {"t.py::test_a", "t.py::test_ab", "t.py::T::test_c[1]"}),
        ({"deselect": ("t.py::test_a",)}, {"t.py::test_ab", "t.py::T::test_c[1]"}),
        ({"nodes": ("t.py::test_a",)}, {"t.py::test_a"}),
        ({"nodes": ("t.py::T",)}, {"t.py::T::test_c[1]"}),
        ({"allow_never_executed": (("T", "why"),)}, {"t.py::test_a", "t.py::test_ab"}),
        ({"allow_never_executed": (("test_a", "why"), ("T::test_c", "why"))}, {"t.py::test_ab"}),
        ({"allow_never_executed": (("T::test_c[1", "why"), ("test_abc", "why"))}, {"t.py::test_a", "t.py::test_ab", "t.py::T::test_c[1]"}),
    ],
)  # fmt: skip
def test_left_out_items_of_a_unit_are_those_it_should_have_run(fields, missing):
    gone = dict.fromkeys(("t.py::test_a", "t.py::test_ab", "t.py::T::test_c[1]"), "deselected by -k")
    found, allowed = never_executed.left_out(unit(**fields), FileEvidence(left_out=gone))
    assert set(found) == missing
    assert all(text == "deselected by -k; why" for text in allowed.values())
    assert not set(found) & set(allowed)


def test_an_item_that_ran_is_not_missing_whatever_another_worker_says():
    evidence = FileEvidence(items={"t.py::test_a": Item("t.py::test_a")}, left_out={"t.py::test_a": "x"})
    assert never_executed.left_out(unit(), evidence) == ({}, {})

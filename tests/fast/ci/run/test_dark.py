"""Tests that never run are found in the source; tests that do run are left in peace."""

from __future__ import annotations

import textwrap

import pytest

from ci.run import dark


def find(source: str, *collected: str) -> list[str]:
    nodes = [f"tests/fast/test_x.py::{name}" for name in collected]
    return [f"{each.what}: {each.reason}" for each in dark.find(textwrap.dedent(source), nodes)]


def test_ordinary_file_has_no_dark_test():
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

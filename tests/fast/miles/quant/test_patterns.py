"""Patterns of recipes and checkpoints cannot run away."""

from __future__ import annotations

import re
import time

import pytest

from miles.quant.patterns import compile_bounded
from miles.quant.scope import Ignore


@pytest.mark.parametrize(
    "pattern",
    [
        ".*lm_head",
        r"re.*self_attn\..*_proj",
        r"model\.layers\.(0|1|23)\..*",
        r".*\.mlp\.(gate|up)_proj$",
        r"a{3}(b{2})?",
        r"layers\.\d+\.mlp\..*",
        r"(?:ab|cd){1,4}",
    ],
)
def test_patterns_that_people_write_are_compiled(pattern):
    assert compile_bounded(pattern).pattern == pattern


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a+)+$", "itself repeats"),
        ("(a|a)*$", "alternatives"),
        ("((ab?)*c)*", "itself repeats"),
        ("(?:x*y){21,}", "itself repeats"),
        (".*a.*b.*c.*d", "4 open repeats"),
        ("a" * 201, "201 characters"),
    ],
)
def test_patterns_that_could_run_away_are_refused(pattern, reason):
    with pytest.raises(ValueError, match=reason):
        compile_bounded(pattern)
    with pytest.raises(ValueError, match=reason):
        Ignore((f"re:{pattern}",))


def test_what_is_no_pattern_is_said_in_those_words():
    with pytest.raises(re.error):
        compile_bounded("(")
    with pytest.raises(ValueError, match="no regular expression"):
        Ignore(("re:(",))


def test_the_slowest_pattern_allowed_is_quick_on_the_longest_names():
    started = time.process_time()
    assert compile_bounded(".*.*.*x").fullmatch("a" * 200) is None
    assert time.process_time() - started < 5

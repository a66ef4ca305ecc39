"""The same failure has the same signature on every machine; different failures have different ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_ci.run.judge.signature import Frame, mask, signature, strip_ansi

FRAMES = [Frame("tests/x.py", "test_a", 3), Frame("miles/y.py", "load", 7), Frame("/usr/lib/z.py", "read", 9)]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("value 3 at step 12", "value 4 at step 999"),
        ("loss 1.5e-3 > -2.0", "loss 7e+10 > 3"),
        ("pointer 0xdeadbeef", "pointer 0x7f00"),
        ("open /home/a/b.txt failed", "open /var/x failed"),
        ("id 123e4567-e89b-42d3-a456-426614174000", "id 00000000-0000-0000-0000-000000000000"),
        ("commit 1a2b3c4d5e", "commit ff00aa11bb22"),
        ("\x1b[31mbad\x1b[0m", "bad"),
    ],
)
def test_what_changes_from_run_to_run_does_not_count(left, right):
    assert signature("E", left, FRAMES) == signature("E", right, FRAMES)


def test_type_words_and_place_count():
    base = signature("E", "bad value", FRAMES)
    assert signature("F", "bad value", FRAMES) != base
    assert signature("E", "other words", FRAMES) != base
    assert signature("E", "bad value", [*FRAMES[:1], Frame("miles/y.py", "save", 7)]) != base


def test_deepest_frame_inside_the_repository_decides_and_its_line_does_not():
    outside = [*FRAMES, Frame("/opt/lib/site-packages/torch/a.py", "f", 1), Frame("site-packages/b.py", "g", 1)]
    assert signature("E", "m", outside) == signature("E", "m", FRAMES)
    assert signature("E", "m", [*FRAMES[:1], Frame("miles/y.py", "load", 70)]) == signature("E", "m", FRAMES)


def test_signature_is_sixteen_hex_digits():
    assert len(signature("E", "m", [])) == 16
    int(signature("E", "m", []), 16)


@given(st.text())
def test_masking_never_fails_and_is_stable(text):
    assert mask(mask(text)) == mask(text) or "<" in text
    strip_ansi(text)

"""Text from outside is valid wherever it entered by our readers of JSON."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from miles_ci.report.strict_json import loads
from miles_ci.run.judge.pytest_events import read_events
from miles_ci.valid_text import valid_text

ANY_TEXT = st.text(alphabet=st.characters(codec=None, exclude_categories=()))
VALUES = st.recursive(
    ANY_TEXT | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner)
)


@given(VALUES)
def test_result_can_be_encoded_and_what_was_valid_is_untouched(value):
    valid = valid_text(value)
    json.dumps(valid, ensure_ascii=False).encode("utf-8")
    assert valid_text(valid) == valid
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        assert valid != value
    else:
        assert valid == value


def test_unpaired_half_becomes_its_visible_escape_and_a_pair_stays():
    assert valid_text("a\ud800b") == "a\\ud800b"
    assert loads(r'{"k\ud800": ["\ud83d\ude00", "\udc00"]}') == {"k\\ud800": ["\U0001f600", "\\udc00"]}


def test_events_of_a_test_process_are_valid(tmp_path):
    events = tmp_path / "events"
    events.write_text('{"event": "collect", "node": "t.py", "outcome": "failed", "text": "\\ud800"}\n')
    (failure,) = read_events(events).files["t.py"].failures()
    assert failure.message == "\\ud800"

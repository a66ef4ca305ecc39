"""One type of metric bound: what decides about it, and its way through a plan."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_ci.metric_bound import SPEC, MetricBound

numbers = st.floats(0, 1e9, allow_nan=False)
bounds = st.builds(
    MetricBound,
    metric=st.text(min_size=1, max_size=20),
    steps=st.sampled_from(["last", "all"]) | st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple),
    magnitude=st.booleans(), rel_up=numbers, abs_up=numbers, rel_down=numbers, abs_down=numbers,
    limit=st.none() | numbers, warmup=st.integers(1, 50),
)  # fmt: skip


@given(bounds)
def test_a_bound_survives_its_json_form(bound: MetricBound) -> None:
    read = MetricBound.from_spec(json.loads(json.dumps(bound.spec())))
    assert (read, read.digest) == (bound, bound.digest)


CHANGED = {
    "metric": "kl", "steps": (1,), "magnitude": False, "rel_up": 1.0, "abs_up": 1.0, "rel_down": 1.0, "abs_down": 1.0,
    "limit": 1.0, "warmup": 6,
}  # fmt: skip


@pytest.mark.parametrize("name", SPEC)
def test_every_field_of_the_spec_changes_the_digest(name: str) -> None:
    bound = MetricBound("loss")
    other = dataclasses.replace(bound, **{name: CHANGED[name]})
    assert other.digest != bound.digest
    assert other != bound


def test_the_place_in_the_source_decides_nothing() -> None:
    moved = MetricBound("loss", path="a.py", line=7, column=3)
    assert moved == MetricBound("loss")
    assert moved.digest == MetricBound("loss").digest
    assert set(SPEC) | {"path", "line", "column"} == {field.name for field in dataclasses.fields(MetricBound)}


def test_an_entry_with_a_missing_or_an_unknown_field_is_no_bound() -> None:
    spec = MetricBound("loss").spec()
    with pytest.raises(KeyError, match="warmup"):
        MetricBound.from_spec({name: value for name, value in spec.items() if name != "warmup"})
    with pytest.raises(TypeError, match="no field 'colour'"):
        MetricBound.from_spec({**spec, "colour": 1})

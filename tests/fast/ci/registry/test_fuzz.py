"""A short run of the fuzzer (`benchmarks/fuzz_registry.py` runs 120,000 registries)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ci.registry.load import read_fleet
from tests.fast.ci.helpers.trees import REPOSITORY, TODAY


def fuzzer() -> ModuleType:
    path = Path(REPOSITORY, "benchmarks/fuzz_registry.py")
    spec = importlib.util.spec_from_file_location("fuzz_registry", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["registry", "source"])
def test_mutated_files_end_in_findings_and_model_and_schema_agree(kind: str) -> None:
    fuzz = fuzzer()
    base = fuzz.REGISTRY if kind == "registry" else fuzz.SOURCE
    tally = fuzz.fuzz(base, getattr(fuzz, kind), 600, seed=11)
    assert tally.failures == []
    assert 0 < tally.accepted < tally.inputs
    assert tally.compared > 30


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@given(data=st.binary(max_size=200) | plain.map(lambda value: repr(value).encode("utf-8", "surrogatepass")))
@settings(max_examples=150)
def test_arbitrary_bytes_are_refused_with_a_place(data: bytes) -> None:
    reading = read_fleet(data, today=TODAY)
    assert reading.fleet is None
    assert reading.errors
    assert all(item.line >= 1 and item.column >= 1 for item in reading.errors)

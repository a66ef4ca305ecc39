"""A small sample of `benchmarks/codec_oracles.py`, which compares the codecs with other people's libraries."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchao")
SCRIPT = Path(__file__).resolve().parents[4] / "benchmarks" / "codec_oracles.py"


@pytest.fixture(scope="module")
def oracles():
    logging.disable(logging.WARNING)  # torchao warns about native parts that it does not need here
    spec = importlib.util.spec_from_file_location("codec_oracles", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["codec_oracles"] = module
    # As `python benchmarks/codec_oracles.py` does: its neighbours are importable.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        spec.loader.exec_module(module)
    module.CHUNK = 1 << 17
    yield module
    logging.disable(logging.NOTSET)


def test_sample_has_no_difference_and_every_comparison_compares(oracles) -> None:
    counts, deviations = oracles.Counts(), oracles.Counts()
    oracles.exhaustive(counts)
    for x in oracles.values(1 << 17, seed=5):
        oracles.elements(counts, x)
    for name, top in (("mxfp8", 448.0), ("mxfp4", 6.0)):
        for x in oracles.blocks(1 << 17, 6, -110, 110, top):
            oracles.mx(counts, deviations, name, x)
    assert {name: entry for name, entry in counts.items() if entry["different"]} == {}
    assert all(entry["compared"] >= 8 for entry in counts.values())
    assert len(counts) == 20


def test_a_wrong_codec_is_noticed(oracles, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = oracles.Counts()
    right = oracles.f.e2m1_encode
    monkeypatch.setattr(oracles.f, "e2m1_encode", lambda x: right(x * 1.0000001))
    for x in oracles.values(1 << 17, seed=5):
        oracles.elements(counts, x)
    assert counts["e2m1 encode, ml_dtypes"]["different"] > 0

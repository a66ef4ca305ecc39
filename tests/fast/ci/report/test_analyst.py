"""The form of an analyst's answer, at each border: what is just allowed, and what is refused with which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles_ci.report.analyst import CATEGORIES, CONFIDENCES, MAX_REASON, TAGS, ClaimError, parse_claims

GOOD: dict[str, Any] = {
    "job_id": "job-1", "test_name": "t::a", "reason": "NCCL broke", "category": "infra", "confidence": "high",
    "tags": [], "related_pr": None, "evidence_refs": ["log-1"],
}  # fmt: skip


def parsed(**changes: Any) -> Any:
    (claim,) = parse_claims(json.dumps([GOOD | changes]))
    return claim


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("test_name", [None, "t"]),
        ("reason", ["x", "x" * MAX_REASON]),
        ("category", sorted(CATEGORIES)),
        ("confidence", sorted(CONFIDENCES)),
        ("tags", [[], sorted(TAGS)[:1], sorted(TAGS)[:2]]),
        ("related_pr", [None, 1, 12]),
        ("evidence_refs", [["a"], ["a", "b"]]),
    ],
)
def test_what_is_just_allowed_is_read(field: str, values: list[Any]) -> None:
    for value in values:
        read = getattr(parsed(**{field: value}), field)
        assert read == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"more": 1}, "expected exactly category, confidence, evidence_refs"),
        ({"job_id": 1}, "job_id is text, test_name text or null"),
        ({"job_id": None}, "job_id is text, test_name text or null"),
        ({"test_name": 1}, "job_id is text, test_name text or null"),
        ({"reason": ""}, f"reason has 1 to {MAX_REASON} characters"),
        ({"reason": "x" * (MAX_REASON + 1)}, f"reason has 1 to {MAX_REASON} characters"),
        ({"reason": None}, f"reason has 1 to {MAX_REASON} characters"),
        ({"category": "weather"}, "unknown category or confidence"),
        ({"confidence": "total"}, "unknown category or confidence"),
        ({"tags": sorted(TAGS)[:3]}, "at most two tags of"),
        ({"tags": ["weather"]}, "at most two tags of"),
        ({"tags": [sorted(TAGS)[0], "weather"]}, "at most two tags of"),
        ({"tags": "nccl"}, "at most two tags of"),
        ({"evidence_refs": []}, "at least one evidence reference"),
        ({"evidence_refs": ["a", 1]}, "at least one evidence reference"),
        ({"evidence_refs": "log-1"}, "at least one evidence reference"),
        ({"related_pr": 0}, "related_pr is a number or null"),
        ({"related_pr": True}, "related_pr is a number or null"),
        ({"related_pr": "12"}, "related_pr is a number or null"),
    ],
)
def test_what_is_just_not_is_refused_with_its_place(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ClaimError, match=rf"^analysis\[1\]: {words}"):
        parse_claims(json.dumps([GOOD, GOOD | changes]))


@pytest.mark.parametrize("answer", [{}, "x", None, 3])
def test_an_answer_that_is_no_list_is_refused(answer: Any) -> None:
    with pytest.raises(ClaimError, match="analysis: expected a list"):
        parse_claims(json.dumps(answer))


@pytest.mark.parametrize("entry", [[], "x", {}, {name: value for name, value in GOOD.items() if name != "tags"}])
def test_an_entry_of_another_form_is_refused(entry: Any) -> None:
    with pytest.raises(ClaimError, match=r"analysis\[0\]: expected exactly"):
        parse_claims(json.dumps([entry]))

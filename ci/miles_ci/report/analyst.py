"""The optional analyst: claims about failures, accepted only as far as the evidence carries them.

An `Analyst` (a model behind some service, or anything else) gets evidence and returns claims in a fixed JSON form.
A field that the evidence does not support becomes null, a reason without support becomes `UNAVAILABLE`. Logs are
data: nothing in them is followed. Whatever goes wrong leaves the deterministic report as it was.
"""

from __future__ import annotations

import enum
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miles_ci.report.strict_json import StrictJsonError, loads

CATEGORIES = ("test_failure", "build", "infra", "timeout", "unknown")
CONFIDENCES = ("low", "medium", "high")
TAGS = (
    "oom", "nccl", "cuda", "rocm", "network", "download", "disk", "assertion", "import", "timeout", "hang", "numerics", "flaky",
)  # fmt: skip
MAX_REASON = 280
TIMEOUT_S = 60.0
_KEYS = {"job_id", "test_name", "reason", "category", "confidence", "tags", "related_pr", "evidence_refs"}


class Unavailable(enum.Enum):
    """A reason that nobody can give; a member of its own type, so that no text can pretend to be it."""

    UNAVAILABLE = "unavailable"


UNAVAILABLE = Unavailable.UNAVAILABLE


@dataclass(frozen=True)
class Analysis:
    """One claim about one failing test (or a job as a whole)."""

    job_id: str
    test_name: str | None
    reason: str | Unavailable
    category: str = "unknown"
    confidence: str = "low"
    tags: tuple[str, ...] = ()
    related_pr: int | None = None
    evidence_refs: tuple[str, ...] = ()
    # Of the failure itself: never an analyst's claim.
    signature: str = ""


@dataclass(frozen=True)
class Evidence:
    """What an analyst may look at: `logs` ref -> text, failing tests of each job, recent pull requests."""

    tests: Mapping[str, Sequence[str]]
    logs: Mapping[str, str]
    commits: Mapping[int, str]


class Analyst(Protocol):
    """Returns JSON text: a list of objects with exactly the keys of `Analysis`."""

    def analyse(self, evidence: Evidence) -> str: ...


class ClaimError(StrictJsonError):
    """The analyst's answer is not in the agreed form."""


def parse_claims(text: str) -> list[Analysis]:
    """Read an answer strictly; additional or missing keys are refused."""
    data = loads(text, what="analysis")
    if not isinstance(data, list):
        raise ClaimError("analysis: expected a list")
    return [_claim(entry, at) for at, entry in enumerate(data)]


def _claim(entry: Any, at: int) -> Analysis:
    if not isinstance(entry, dict) or set(entry) != _KEYS:
        raise ClaimError(f"analysis[{at}]: expected exactly {', '.join(sorted(_KEYS))}")
    job, name, reason, pr = entry["job_id"], entry["test_name"], entry["reason"], entry["related_pr"]
    if not isinstance(job, str) or not (name is None or isinstance(name, str)):
        raise ClaimError(f"analysis[{at}]: job_id is text, test_name text or null")
    if not isinstance(reason, str) or not 1 <= len(reason) <= MAX_REASON:
        raise ClaimError(f"analysis[{at}]: reason has 1 to {MAX_REASON} characters")
    if entry["category"] not in CATEGORIES or entry["confidence"] not in CONFIDENCES:
        raise ClaimError(f"analysis[{at}]: unknown category or confidence")
    tags, refs = entry["tags"], entry["evidence_refs"]
    if not isinstance(tags, list) or len(tags) > 2 or not all(tag in TAGS for tag in tags):
        raise ClaimError(f"analysis[{at}]: at most two tags of {', '.join(TAGS)}")
    if not isinstance(refs, list) or not refs or not all(isinstance(ref, str) for ref in refs):
        raise ClaimError(f"analysis[{at}]: at least one evidence reference")
    if pr is not None and (type(pr) is not int or pr < 1):
        raise ClaimError(f"analysis[{at}]: related_pr is a number or null")
    return Analysis(job, name, reason, entry["category"], entry["confidence"], tuple(tags), pr, tuple(refs))


def ground(claims: Sequence[Analysis], evidence: Evidence) -> list[Analysis]:
    """Keep what the evidence supports; every failing test gets exactly one entry."""
    wanted = [(job, test) for job, tests in evidence.tests.items() for test in tests]
    by_test: dict[tuple[str, str | None], Analysis] = {}
    for claim in claims:
        by_test.setdefault((claim.job_id, claim.test_name), claim)
    out = []
    for job, test in wanted:
        found = by_test.get((job, test))
        out.append(_ground(found, evidence) if found else Analysis(job, test, UNAVAILABLE))
    return out


def _ground(claim: Analysis, evidence: Evidence) -> Analysis:
    refs = tuple(ref for ref in claim.evidence_refs if ref in evidence.logs)
    text = "\n".join(evidence.logs[ref] for ref in refs)
    # A tag must stand in the evidence as a whole word: "oom" is not in "room".
    tags = tuple(
        tag for tag in claim.tags if re.search(rf"(?<![A-Za-z0-9]){re.escape(tag)}(?![A-Za-z0-9])", text, re.IGNORECASE)
    )
    pr = claim.related_pr if claim.related_pr in evidence.commits else None
    reason: str | Unavailable = claim.reason if refs and len(refs) == len(claim.evidence_refs) else UNAVAILABLE
    return Analysis(claim.job_id, claim.test_name, reason, claim.category, claim.confidence, tags, pr, refs)


def run_analyst(
    analyst: Analyst | None, evidence: Evidence, *, timeout_s: float = TIMEOUT_S
) -> tuple[list[Analysis], str]:
    """Grounded analyses and, when the analyst could not be used, why. Never raises, never waits longer."""
    empty = [Analysis(job, test, UNAVAILABLE) for job, tests in evidence.tests.items() for test in tests]
    if analyst is None:
        return empty, "no analyst is configured"
    answer: list[str] = []
    problem: list[str] = []

    def ask() -> None:
        try:
            answer.append(analyst.analyse(evidence))
        except Exception as error:  # whatever an outside service does, the report stands
            problem.append(f"{type(error).__name__}: {error}"[:200])

    worker = threading.Thread(target=ask, daemon=True)
    worker.start()
    worker.join(timeout_s)
    if worker.is_alive():
        return empty, f"the analyst did not answer within {timeout_s:g} s"
    if problem:
        return empty, problem[0]
    try:
        return ground(parse_claims(answer[0]), evidence), ""
    except StrictJsonError as error:
        return empty, str(error)

"""JUnit XML of one shard, one testcase for each node and one for each unit that has none."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from miles_ci.files import write_whole
from miles_ci.run import results
from miles_ci.run.judge.signature import strip_ansi
from miles_ci.run.results import ShardResults, TestResult

JUNIT_NAME = "junit.xml"
# What XML 1.0 cannot carry, and the unpaired halves that Python strings can.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_FAILING = ("failed", "error", "unfinished")


def clean(text: str) -> str:
    """Text that every XML reader takes: no colours, no control characters."""
    return _FORBIDDEN.sub("", strip_ansi(text))


def junit(shard: ShardResults) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=f"{shard.info.suite} {shard.info.shard}", hostname=shard.info.host)
    for test in sorted(shard.tests, key=lambda test: test.unit):
        for case in _cases(test):
            suite.append(case)
    cases = list(suite)
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("tests", str(len(cases)))
    suite.set("time", f"{sum(test.wall_s for test in shard.tests):.3f}")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    return root


def _cases(test: TestResult) -> list[ElementTree.Element]:
    failures = {failure.node: failure for failure in (test.attempts[-1].failures if test.attempts else ())}
    cases = []
    for node, outcome in sorted(test.nodes.items()):
        case = _case(test.path, node.partition("::")[2] or node, test.node_ms.get(node, 0) / 1000)
        failure = failures.get(node)
        if outcome in _FAILING:
            message = failure.message if failure else f"outcome {outcome}"
            if results.PASSED in test.reruns:
                message = f"{results.THEN_PASSED}: {message}"
            _detail(case, "failure" if outcome == "failed" else "error", message, failure.type if failure else outcome)
        elif outcome in ("skipped", "xfailed"):
            _detail(case, "skipped", outcome, outcome)
        cases.append(case)
    # The unit itself speaks where its nodes do not show what is wrong with it.
    silent = not any(outcome in _FAILING for outcome in test.nodes.values())
    if silent and (test.blocks or not cases or test.outcome == results.UNSTABLE_FAILED):
        case = _case(test.path, f"[{test.outcome}]", test.wall_s if not cases else 0.0)
        metrics = "; ".join(metric.message for metric in test.metrics if metric.blocks)
        message = "; ".join(part for part in (test.message, metrics) if part) or test.outcome
        _detail(case, "error" if test.blocks else "skipped", message, test.outcome)
        cases.append(case)
    return cases


def _case(path: str, name: str, seconds: float) -> ElementTree.Element:
    attributes = {"classname": clean(path), "name": clean(name), "file": clean(path), "time": f"{seconds:.3f}"}
    return ElementTree.Element("testcase", attributes)


def _detail(case: ElementTree.Element, tag: str, message: str, kind: str) -> None:
    detail = ElementTree.SubElement(case, tag, message=clean(message)[:500], type=clean(kind))
    detail.text = clean(message)


def write(shard: ShardResults, path: Path) -> None:
    """Whole or not at all."""
    write_whole(path, ElementTree.tostring(junit(shard), encoding="utf-8", xml_declaration=True))

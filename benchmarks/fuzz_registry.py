"""Feed generated files to the registry parser and sources to the declaration reader: nothing may escape.

    python benchmarks/fuzz_registry.py                     # 120,000 registries, 60,000 sources, some minutes
    python benchmarks/fuzz_registry.py --registries 5000 --sources 2000 --seed 7

Every input must end in findings or in a fleet. An exception is a failure and its input is printed. Registries
are mutated from a small valid one: bytes, lines, indentation, values, whole subtrees; one in five is also
checked for agreement between the model and the JSON Schema. Prints counts; exit code 1 on any failure.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "ci"))

from pydantic import ValidationError  # noqa: E402

from miles_ci.declare.reader import defines_tests, read_source  # noqa: E402
from miles_ci.registry.load import read_fleet  # noqa: E402
from miles_ci.registry.model import Fleet  # noqa: E402
from miles_ci.registry.schema import schema_findings  # noqa: E402

TODAY = date(2026, 11, 30)

REGISTRY = """\
version: 1
hardware:
  cpu: {vendor: cpu, arch: cpu}
  h200: {vendor: nvidia, arch: hopper, sm: 90, memory_gib: 139, capabilities: [bf16, fp8]}
pools:
  h200-1gpu:
    hardware: h200
    labels: [self-hosted, h200]
    gpus_per_runner: 1
    count: 2
    disabled: {reason: "node is being re-imaged", issue: "#12", until: 2026-12-24}
suites:
  stage-a-cpu: {tier: a, backend: cpu, hardware: [cpu], runs_on: [ubuntu], target_wall_s: 300, max_shards: 4, timeout_s: 900, test_timeout_s: 300, owner: ci}
  stage-b-gpu:
    {tier: b, backend: cuda, hardware: [h200], gpus: 1, pools: [h200-1gpu], needs: stage-a-cpu, target_wall_s: 900, max_shards: 4, timeout_s: 1800, test_timeout_s: 900, owner: ci}
labels:
  domain:
    kernels: {description: "Triton kernels", owner: kernels}
  scope:
    run-ci-all: {description: all, owner: ci}
cadences:
  regular: {admit_nightly: false, include: requested, bypass_fastfail: false, write_baseline: false, arches: home}
  nightly: {crons: ["0 15 * * 0-5"], admit_nightly: true, include: all, bypass_fastfail: true, write_baseline: true, arches: home}
  weekly: {crons: ["0 15 * * 6"], admit_nightly: true, include: all, bypass_fastfail: true, write_baseline: true, arches: all}
  release: {admit_nightly: true, include: all, bypass_fastfail: true, write_baseline: false, arches: all}
selection:
  inert: ["*.md"]
  edges:
    - {when: registry.yaml, tests: "**"}
retry:
  oom: {kind: test, where: [exception], pattern: OutOfMemory, action: none}
"""

SOURCE = """\
from miles_ci.declare import register_cuda_ci, register_metric_bound

register_cuda_ci(
    est_time=60, suite="stage-b-gpu", hardware=["h200"], num_gpus=1, labels=["kernels"],
    disabled={"reason": "fails on the new driver", "issue": "#12", "until": "2026-12-24"},
)
register_metric_bound("loss", rel_up=0.1, abs_down=1e-3, steps=[1, 2])


def test_it():
    assert [x for x in range(3)]
"""

# Words that mean something to YAML, Python or the model, or nothing to any of them.
WORDS = [
    "null", "true", "yes", "~", "0", "-1", "1.0", "1e999", ".inf", "0x10", "0o7", "1_000", "1:30", "2026-02-30", "99999999999999999999",
    "{}", "[]", "''", '""', "&a", "*a", "<<", "!!int", "!x", "|", ">", "---", "...", "?", "-", ":", "#", "@", "`", "%", "\t", "\u2028",
    "\u00e9", "\U0001f600", "\ufeff", "\x00", "\x85", "h200", "stage-a-cpu", "kernels", "[[[[", "}}}}", "a: b: c", "\"unclosed", "(?P<x", "*" * 40,
    "a" * 300, "{a: &x [*x]}", "lambda: 0", "f'{x}'", "*args", "**kw", "(" * 60, "if True:", "def f(", "\\", "'''", "est_time=", "\r", "\r\n",
]  # fmt: skip


def mutate(text: str, chance: random.Random) -> bytes:
    """One to four random changes of bytes, words, lines or structure."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        kind = chance.randrange(8)
        lines = text.split("\n")
        index = chance.randrange(len(lines))
        if kind == 0:
            place = chance.randrange(len(text) + 1)
            text = text[:place] + chance.choice(WORDS) + text[place:]
        elif kind == 1 and text:
            place = chance.randrange(len(text))
            text = text[:place] + text[place + chance.randint(1, 12) :]
        elif kind == 2:
            lines.insert(chance.randrange(len(lines) + 1), lines[index])
            text = "\n".join(lines)
        elif kind == 3:
            del lines[index]
            text = "\n".join(lines)
        elif kind == 4:
            lines[index] = " " * chance.randrange(9) + lines[index].strip()
            text = "\n".join(lines)
        elif kind == 5:
            words = lines[index].split(" ")
            words[chance.randrange(len(words))] = chance.choice(WORDS)
            lines[index] = " ".join(words)
            text = "\n".join(lines)
        elif kind == 6:
            other = chance.randrange(len(lines))
            lines[index], lines[other] = lines[other], lines[index]
            text = "\n".join(lines)
        else:
            key, colon, _ = lines[index].partition(":")
            if colon:
                lines[index] = f"{key}: {chance.choice(WORDS)}"
                text = "\n".join(lines)
    data = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.05 and data:
        place = chance.randrange(len(data))
        data = data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
    return data


class Tally:
    """Counts of what came out, and the inputs that let something escape."""

    def __init__(self) -> None:
        self.inputs = 0
        self.accepted = 0
        self.compared = 0
        self.failures: list[str] = []

    def fail(self, data: bytes, why: str) -> None:
        self.failures.append(why)
        if len(self.failures) <= 5:
            print(f"FAILURE: {why}\ninput: {data!r}\n", file=sys.stderr)


def registry(data: bytes, tally: Tally, compare: bool) -> None:
    reading = read_fleet(data, today=TODAY)
    assert reading.fleet is not None or reading.errors, "refused without a reason"
    assert all(item.line >= 1 and item.column >= 1 and item.message for item in reading.findings), (
        "a finding without place"
    )
    tally.accepted += reading.fleet is not None
    if not compare or not isinstance(reading.document.data, dict):
        return
    try:
        Fleet.model_validate(reading.document.data)
        model_accepts = True
    except ValidationError:
        model_accepts = False
    schema_accepts = next(iter(schema_findings(reading.document.data)), None) is None
    tally.compared += 1
    assert model_accepts == schema_accepts, f"model {model_accepts}, schema {schema_accepts}"


def source(data: bytes, tally: Tally, compare: bool) -> None:
    found = read_source("tests/e2e/test_x.py", data)
    assert all(item.line >= 1 and item.column >= 1 and item.message for item in found.errors), "a finding without place"
    tally.accepted += not found.errors
    if compare:
        defines_tests("tests/e2e/x.py", data)
        tally.compared += 1


def fuzz(base: str, check: Callable[[bytes, Tally, bool], None], count: int, seed: int) -> Tally:
    chance = random.Random(seed)
    tally = Tally()
    for index in range(count):
        data = mutate(base, chance)
        tally.inputs += 1
        try:
            check(data, tally, index % 5 == 0)
        except Exception as error:
            tally.fail(data, "".join(traceback.format_exception_only(error)).strip() + traceback.format_exc()[-600:])
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registries", type=int, default=120_000)
    parser.add_argument("--sources", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    assert read_fleet(REGISTRY.encode(), today=TODAY).findings == (), "the starting registry must be valid"
    assert read_source("tests/e2e/test_x.py", SOURCE.encode()).errors == (), "the starting source must be valid"
    failures = 0
    for name, base, check, count in (
        ("registries", REGISTRY, registry, args.registries),
        ("sources", SOURCE, source, args.sources),
    ):
        start = time.perf_counter()
        tally = fuzz(base, check, count, args.seed)
        failures += len(tally.failures)
        compared = f", {tally.compared:,} compared with the JSON Schema" if check is registry else ""
        print(
            f"{tally.inputs:,} {name}: {tally.accepted:,} accepted, {tally.inputs - tally.accepted:,} refused with findings"
            f"{compared}, {len(tally.failures)} failures, {time.perf_counter() - start:.0f} s"
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

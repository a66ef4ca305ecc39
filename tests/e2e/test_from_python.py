"""`miles.train` from a coroutine: the curve of the command, Ctrl-C that leaves nothing, errors that come out of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from family_tree import descendants, require_gone
from waiting import wait_until

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=90, suite="stage-b-cpu", timeout=600)

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
REWARD = """def reward(completion, answer, metadata):
    return sum(a == b for a, b in zip(completion, answer)) / len(answer)
"""
PROGRAM = """import asyncio, json, sys
import miles
{reward}
async def main():
    seen = []
    for _ in range(2):
        result = miles.train("recipes/quickstart.yaml", overrides=sys.argv[1:], reward=reward, on_step=seen.append, quiet=True)
    await asyncio.sleep(0)
    print(json.dumps([str(result), result.metric("rollout/reward_mean"), len(seen), str(result.folder)]))

asyncio.run(main())
"""
STEPS = ("run.steps=4", "eval.sets=[{name: held_out, prompts: 8}]", "expect={}")


def started(runs, folder: Path, name: str, *sets: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    path = folder / "program.py"
    path.write_text(program.replace("{reward}", REWARD))
    process = subprocess.Popen(
        [sys.executable, str(path), f"name={name}", f"run.directory={runs.folder}", *sets],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(runs.temporary)},
    )
    runs.started.append(process)
    return process


def test_a_coroutine_trains_with_a_function_of_its_own_as_the_command_does_with_a_file(runs, tmp_path: Path) -> None:
    process = started(runs, tmp_path, "program", *STEPS)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    line, rewards, rows, folder = json.loads(out)
    assert line.startswith("program: reward 0.")
    assert (len(rewards), rows, folder) == (4, 5, str(runs.folder / "program"))
    (tmp_path / "own.py").write_text(REWARD)
    sets = ("rollout.reward.kind=python", f"rollout.reward.options.path=python:{tmp_path}/own.py:reward")
    command = runs.run("command", *STEPS, *sets)
    assert command.returncode == 0, command.stderr
    assert runs.curve("program") == runs.curve("command")


def test_an_interrupt_below_a_running_loop_leaves_no_process(runs, tmp_path: Path) -> None:
    process = started(runs, tmp_path, "long", "run.steps=4000", "eval.sets=[]", "expect={}")
    wait_until(lambda: process.poll() is not None or len(runs.rows("long")) > 2, "step 3 of long")
    assert process.poll() is None, process.communicate()
    below = descendants(process.pid)
    assert len(below) > 4
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert err.rstrip().endswith("KeyboardInterrupt")
    require_gone(below, "the run")


def test_what_on_step_raises_comes_out_of_the_call_and_leaves_no_process(runs, tmp_path: Path) -> None:
    program = PROGRAM.replace("seen = []", "seen = {0: 'zero'}").replace("seen.append", "lambda row: seen[row['step']]")
    program = program.replace(
        "asyncio.run(main())",
        "import psutil\ntry:\n    asyncio.run(main())\nexcept KeyError as error:\n"
        "    print(error, psutil.Process().children(recursive=True))\n",
    )
    process = started(runs, tmp_path, "stopped", *STEPS, program=program)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert out == "1 []\n"
    assert [row["step"] for row in runs.rows("stopped")] == [0, 1]

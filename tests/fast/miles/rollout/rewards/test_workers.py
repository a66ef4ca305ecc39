"""Worker processes: limits, clocks, reuse, and that none outlives anybody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from judging import Texts, context, samples_of

from miles.rollout.rewards import RewardConfig, RewardFn, RewardPool, WorkerCall, build_reward

SLEEP = "import time\ndef judge(completion, answer, metadata):\n    time.sleep(float(completion))\n    return 1.0\n"
PID = "import os\ndef judge(completion, answer, metadata):\n    return {'reward': 1.0, 'pid': os.getpid()}\n"


def test_waiting_for_a_worker_does_not_count(judge, own_file):
    judged = judge(["0.3"] * 8, kind="python", options=own_file(SLEEP), timeout_s=1, concurrency=2)
    assert judged.rewards == [1.0] * 8
    assert judged.started == 2


def test_at_most_concurrency_functions_run_at_once_and_so_many_do(judge, own_file, tmp_path):
    source = (
        "import os, time\n"
        f"folder = {str(tmp_path)!r}\n"
        "def judge(completion, answer, metadata):\n"
        "    mine = f'{folder}/running-{completion}'\n"
        "    open(mine, 'w').close()\n"
        "    deadline = time.monotonic() + float(metadata['wait'])\n"
        "    seen = 0\n"
        "    while time.monotonic() < deadline and seen < metadata['enough']:\n"
        "        seen = max(seen, sum(name.startswith('running-') for name in os.listdir(folder)))\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(0.05)\n"
        "    seen = max(seen, sum(name.startswith('running-') for name in os.listdir(folder)))\n"
        "    os.unlink(mine)\n"
        "    return {'reward': 1.0, 'seen': seen}\n"
    )
    options, texts = own_file(source), [str(i) for i in range(12)]
    wait = {"wait": 20, "enough": 6}
    judged = judge(texts, kind="python", options=options, concurrency=6, metadata=wait, timeout_s=60)
    assert max(parts["seen"] for parts in judged.parts) == 6


def test_at_most_concurrency_coroutines_run_at_once(judge):
    running, most = [0], [0]

    async def count(*_):
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1
        return 1.0

    judge(["x"] * 12, RewardFn("async", awaited=count), concurrency=3)
    assert most[0] == 3


def test_what_computes_gets_a_process_a_core_at_most(judge):
    call = WorkerCall("miles.rollout.reward_worker.regex:make", {"pattern": "a", "compare": False}, computes=True)
    judged = judge(["a"] * 40, RewardFn("r", worker=call), concurrency=40)
    assert judged.rewards == [1.0] * 40
    assert judged.started <= len(os.sched_getaffinity(0))


def test_a_pattern_without_end_is_bounded_by_the_limit(judge):
    pattern = r"<answer>(?:\s|.)*?(?:[A-Za-z]+\s?)+</answer>"
    texts = ["<answer>" + "a" * 29, "<answer>word</answer>"]
    judged = judge(texts, kind="regex", options={"pattern": pattern, "compare": False}, timeout_s=1)
    assert judged.rewards == [None, 1.0]
    assert judged.errors == 1


def test_a_comparison_without_end_is_an_error_of_the_judge_and_never_unequal(judge):
    # SymPy would need ages for this; the limit ends it, and the next answer meets a new worker.
    hard = r"\boxed{\frac{1}{x-x} + " + "+".join(rf"\sqrt{{x+{i}+\sqrt{{y+{i}}}}}" for i in range(20)) + "}"
    judged = judge([hard, r"\boxed{2+2}"], answer="4", kind="math_boxed", options={"timeout_s": 1})
    assert judged.rewards[1] == 1.0
    assert judged.rewards[0] in (None, 0.0)


def test_a_stuck_judge_is_killed_and_the_sample_is_masked(judge, tmp_path, monkeypatch):
    (tmp_path / "stuck_judge.py").write_text(
        "def make():\n"
        "    def judge(completion, answer, metadata):\n"
        "        while completion == 'stuck': pass\n"
        "        return 1.0\n"
        "    return judge\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    call = WorkerCall("stuck_judge:make", computes=True, timeout_s=0.5)
    fn = RewardFn("math", worker=call, masks_errors=True)
    judged = judge(["stuck", "fine", "stuck", "fine"], fn, concurrency=1)
    assert judged.rewards == [None, 1.0, None, 1.0]
    assert judged.errors == 2


def test_workers_are_reused(judge, own_file):
    judged = judge(["a"] * 20, kind="python", options=own_file(PID), concurrency=1)
    assert judged.started == 1
    assert len({parts["pid"] for parts in judged.parts}) == 1


def test_the_same_sample_draws_the_same_random_numbers_whichever_worker_judges_it(judge, own_file):
    source = (
        "import random\nimport numpy\n"
        "def judge(completion, answer, metadata):\n"
        "    return {'reward': random.random(), 'numpy': numpy.random.rand()}\n"
    )
    options = own_file(source)
    one, two = (judge(["a"] * 6, kind="python", options=options, concurrency=n) for n in (1, 6))
    assert (one.rewards, one.parts) == (two.rewards, two.parts)
    assert len(set(one.rewards)) == 6


def test_a_coroutine_function_of_the_users_runs_in_the_event_loop(judge, own_file):
    source = "import os\nasync def judge(completion, answer, metadata):\n    return os.getpid()\n"
    assert judge(["a"], kind="python", options=own_file(source)).rewards == [float(os.getpid())]


def test_a_module_with_threads_is_imported_by_each_worker(judge, own_file):
    source = (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "def judge(completion, answer, metadata):\n"
        "    return float(any(t.name != 'MainThread' for t in threading.enumerate()))\n"
    )
    assert judge(["a", "b"], kind="python", options=own_file(source)).rewards == [1.0, 1.0]


def test_a_module_that_only_a_worker_cannot_import_is_an_error_with_its_reason(judge, own_file):
    source = (
        f"import os\nif os.getpid() != {os.getpid()}: raise ImportError('not here')\ndef judge(a, b, c): return 1\n"
    )
    with pytest.raises(Exception, match=r"the worker cannot start: .*not here"):
        judge(["a"], kind="python", options=own_file(source))


def alive(pids) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def gone(pids, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pids)


def test_closing_ends_hanging_workers_and_what_they_started(own_file, tmp_path):
    source = (
        "import os, subprocess, time\n"
        "def judge(completion, answer, metadata):\n"
        f"    child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    open(f'{tmp_path}/{{os.getpid()}}-{{child.pid}}', 'w').close()\n"
        "    time.sleep(600)\n"
    )
    config = RewardConfig(kind="python", options=own_file(source), timeout_s=600, concurrency=8)

    async def run() -> float:
        pool = RewardPool(config, build_reward(config), Texts(["x"] * 8))
        pool.start()
        task = asyncio.ensure_future(pool.judge(context(), samples_of(["x"] * 8)))
        while len(list(tmp_path.glob("*-*"))) < 8:
            await asyncio.sleep(0.02)
            assert not task.done()
        started = time.monotonic()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        pool.close()
        return time.monotonic() - started

    took = asyncio.run(run())
    pids = [int(pid) for path in tmp_path.glob("*-*") for pid in path.name.split("-")]
    assert len(pids) == 16
    assert gone(pids)
    # They would sleep for ten minutes.
    assert took < 30


@pytest.mark.parametrize("copied", [False, True], ids=["alone", "its sockets are open in another process"])
def test_after_a_kill_of_the_driver_no_worker_is_left(own_file, tmp_path, copied):
    source = (
        "import os, time\n"
        "def judge(completion, answer, metadata):\n"
        f"    open(f'{tmp_path}/w-{{os.getpid()}}-{{os.getppid()}}', 'w').close()\n"
        "    while True: pass\n"
    )
    options = own_file(source)
    driver = tmp_path / "driver.py"
    driver.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        sys.path[:0] = {sys.path!r}
        from judging import Texts, context, samples_of
        from miles.rollout.rewards import RewardConfig, RewardPool, build_reward
        config = RewardConfig(kind="python", options={options!r}, timeout_s=600)
        pool = RewardPool(config, build_reward(config), Texts(["x"] * 3))
        pool.start()
        import os, time
        if {copied} and os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        asyncio.run(pool.judge(context(), samples_of(["x"] * 3)))
        """)
    )
    process = subprocess.Popen([sys.executable, str(driver)], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("w-*"))) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        pids = {int(pid) for path in tmp_path.glob("w-*") for pid in path.name.split("-")[1:]}
        assert len(pids) == 4  # three workers, one fork server
        assert len(alive(pids)) == 4
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    try:
        assert gone(pids)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_killed_fork_server_is_started_again(own_file):
    config = RewardConfig(kind="python", options=own_file(PID), on_error="mask")

    async def run() -> list[float | None]:
        pool = RewardPool(config, build_reward(config), Texts(["x"]))
        pool.start()
        rewards: list[float | None] = []
        try:
            for _ in range(3):
                [one] = samples_of(["x"])
                await pool.judge(context(), [one])
                rewards.append(one.reward)
                if len(rewards) == 1:
                    server = psutil.Process(int(one.reward_parts["pid"])).parent()
                    server.kill()
                    gone([server.pid, int(one.reward_parts["pid"])])
        finally:
            pool.close()
        return rewards

    first, _, last = asyncio.run(run())
    assert first == last == 1.0


def test_a_worker_imports_no_torch():
    modules = ("miles.rollout.reward_worker.worker", "miles.rollout.reward_worker.user_function")
    code = f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'numpy', 'ray', 'aiohttp') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

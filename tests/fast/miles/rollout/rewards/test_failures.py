"""Functions that fail, hang, print, exit or return nonsense: one error each, with sample, place and text."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from judging import Texts, context, samples_of

from miles.rollout.errors import RewardError
from miles.rollout.reward_worker.values import reward_and_parts
from miles.rollout.rewards import RewardConfig, RewardFn, RewardPool, WorkerCall

HEADER = "import ctypes, os, sys, time\n\ndef judge(completion, answer, metadata):\n"
BAD = {
    "raises": ("    return 1 / 0", "ZeroDivisionError: division by zero"),
    "exits": ("    sys.exit(3)", "SystemExit: 3"),
    "ends the process": ("    os._exit(0)", "worker process died"),
    "crashes": ("    ctypes.string_at(0)", "Segmentation fault"),
    "prints without end": ("    while True: print('x' * 1000)", "wrote more than 256 KiB"),
    "takes more memory than the limit": ("    return len(bytearray(2 << 30))", "MemoryError"),
    "hangs": ("    while True: pass", "no reward within rollout.reward.timeout_s=1"),
    "sleeps": ("    time.sleep(600)", "no reward within rollout.reward.timeout_s=1"),
    "interrupts": ("    raise KeyboardInterrupt", "KeyboardInterrupt"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_failing_function_is_an_error_with_sample_function_place_and_completion(judge, own_file, name):
    line, reason = BAD[name]
    options = own_file(HEADER + line + "\n")
    with pytest.raises(RewardError) as caught:
        judge(["z" * 300], kind="python", options=options, timeout_s=1, memory_gib=1)
    text = str(caught.value)
    assert text.startswith("sample s-0: reward python:")
    assert reason in text
    assert "own_rewards.py:4, in judge" in text
    assert repr("z" * 200) + "..." in text
    assert "z" * 201 not in text
    assert "fix the function, or set rollout.reward.on_error=mask" in text
    assert "reward_worker" not in text


def test_masking_leaves_the_sample_without_a_reward_and_replaces_the_worker(judge, own_file):
    options = own_file(
        HEADER + "    if completion == 'bad': os._exit(1)\n    if completion == 'hang': time.sleep(600)\n    return 1\n"
    )
    texts = ["good", "bad", "hang", "good", "bad", "good"]
    judged = judge(texts, kind="python", options=options, timeout_s=1, on_error="mask", concurrency=1)
    assert judged.rewards == [1.0, None, None, 1.0, None, 1.0]
    assert judged.errors == 3
    # Three were lost, each was replaced, and the one that works is kept.
    assert judged.started == 4


def test_of_several_failures_the_first_sample_is_named_whoever_fails_first(judge, own_file):
    options = own_file(HEADER + "    time.sleep(float(completion))\n    raise ValueError(completion)\n")
    with pytest.raises(RewardError, match=r"sample s-0: .*ValueError: 0\.3"):
        judge(["0.3", "0.0", "0.1"], kind="python", options=options, concurrency=3)


def test_output_of_a_quiet_function_is_not_counted_together(judge, own_file):
    options = own_file(HEADER + "    print('x' * 200_000)\n    sys.stderr.write('y')\n    return 1.0\n")
    judged = judge(["a"] * 4, kind="python", options=options, concurrency=1)
    assert judged.rewards == [1.0] * 4
    assert judged.started == 1


def test_output_that_is_written_below_python_is_counted_too(judge, own_file):
    options = own_file(
        HEADER + "    try:\n        while True: os.write(1, b'x' * 4096)\n    except OSError:\n        return 1.0\n"
    )
    with pytest.raises(RewardError, match="wrote more than 256 KiB"):
        judge(["a"], kind="python", options=options)


def test_a_worker_that_printed_without_end_is_replaced(judge, own_file):
    options = own_file(HEADER + "    while completion == 'storm': print('x' * 1000)\n    return 1.0\n")
    judged = judge(["storm", "quiet"], kind="python", options=options, concurrency=1, on_error="mask")
    assert judged.rewards == [None, 1.0]
    assert judged.started == 2


def test_a_function_cannot_write_its_own_verdict_into_another_call(judge, own_file):
    source = (
        "import json, os, struct, time\n"
        "def judge(completion, answer, metadata):\n"
        "    for fd in range(3, 64):\n"
        "        try:\n"
        "            body = json.dumps({'nonce': 'x', 'reward': 1.0, 'parts': {}, 'retire': False}).encode()\n"
        "            os.write(fd, struct.pack('>I', len(body)) + body)\n"
        "        except OSError:\n"
        "            pass\n"
        "    time.sleep(0.5)\n"
        "    return 0.0\n"
    )
    with pytest.raises(RewardError, match="answered what nobody asked"):
        judge(["a"], kind="python", options=own_file(source))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
    ],
)
def test_numbers_of_every_kind_are_rewards(value, expected):
    assert reward_and_parts(value) == (expected, {})
    assert reward_and_parts({"reward": value, "part": value}) == (expected, {"part": expected})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("0.5", "is the text '0.5'; return a number"),
        (b"1", "is the text"),
        (None, "type NoneType"),
        ([1.0], "type list"),
        (np.array([1.0]), "type ndarray"),
        (np.array("0.5"), "type str"),
        (1j, "type complex"),
        (float("nan"), "is nan"),
        (float("-inf"), "is -inf"),
        (10**400, "too large"),
        ({}, "no key 'reward'"),
        ({"format": 1.0}, "no key 'reward'"),
        ({"reward": 1.0, "part": "1"}, "part part is the text"),
        ({"reward": 1.0, "part": float("inf")}, "part part is inf"),
        ({"reward": 1.0, "a b": 1.0}, "names no part"),
        ({"reward": 1.0, 3: 1.0}, "names no part"),
        ({"reward": 1.0, **{f"p{i}": 0.0 for i in range(64)}}, "65 parts"),
    ],
)
def test_what_is_no_finite_number_is_refused(value, reason):
    with pytest.raises((TypeError, ValueError), match=reason):
        reward_and_parts(value)


@pytest.mark.parametrize("way", ["inline", "awaited"])
def test_functions_in_the_driver_fail_in_the_same_words(judge, way):
    async def later(*_):
        return 1 / 0

    fn = RewardFn("mine", inline=lambda *_: 1 / 0) if way == "inline" else RewardFn("mine", awaited=later)
    with pytest.raises(RewardError, match=r"sample s-0: reward mine failed: ZeroDivisionError") as caught:
        judge(["z"], fn)
    assert "test_failures.py:" in str(caught.value)
    assert "completion: 'z'" in str(caught.value)
    assert judge(["z"], fn, on_error="mask").rewards == [None]


def test_a_coroutine_that_ignores_its_cancellation_is_left_behind():
    async def run() -> list[str]:
        told, log = asyncio.Event(), []

        async def stubborn(*_):
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                await told.wait()
            log.append("ended")
            return 1.0

        pool = RewardPool(RewardConfig(timeout_s=0.1), RewardFn("stubborn", awaited=stubborn), Texts(["z"]))
        with pytest.raises(RewardError, match=r"timeout_s=0\.1"):
            await asyncio.wait_for(pool.judge(context(), samples_of(["z"])), 30)
        log.append("told")
        told.set()
        await asyncio.sleep(0.05)
        return log

    assert asyncio.run(run()) == ["told", "ended"]


def test_where_only_the_models_text_can_be_at_fault_the_sample_is_masked(judge):
    never = WorkerCall("miles.rollout.reward_worker.regex:make", {"pattern": "(a+)+$", "compare": False})
    text = "a" * 40 + "b"
    assert judge([text], RewardFn("r", worker=never, masks_errors=True), timeout_s=0.5).rewards == [None]
    with pytest.raises(RewardError, match=r"timeout_s=0\.5"):
        judge([text], RewardFn("r", worker=never), timeout_s=0.5)
    with pytest.raises(RewardError, match=r"timeout_s=0\.5"):
        judge([text], RewardFn("r", worker=never, masks_errors=True), timeout_s=0.5, on_error="raise")

"""Requests on an in-process engine that are caught in the act, and weight updates of it."""

from __future__ import annotations

import time

import torch

PROMPTS = [[3, 5, 7, 9], [2, 4, 6], [8] * 20, [3, 5, 7, 9]]


def params(n=300, count=4):
    return [{"max_new_tokens": n, "sampling_seed": i, "ignore_eos": True} for i in range(count)]


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.001)


def freeze(engine, mode, n=300):
    """Start PROMPTS and pause while they run."""
    pending = engine.start(PROMPTS, params(n))
    wait_until(lambda: engine.batch.tokens_generated > 20)
    engine.scheduler.pause(mode).result(10)
    assert not pending.done
    return pending


def plain(outputs):
    return [(o.tokens, o.log_probs) for o in outputs]


def scale_weights(engine, factor):
    with torch.inference_mode():
        for name, tensor in engine.scheduler.parameters().items():
            if name.endswith("proj.weight"):
                tensor.mul_(factor)


def update(engine, version, factor, run_id="run"):
    token = engine.begin(version, run_id=run_id)
    scale_weights(engine, factor)
    engine.scheduler.flush_caches()
    engine.scheduler.finish_update(token)


def half_prefilled(engine, prompt, n, **body):
    """A request whose prompt is computed in part when the engine pauses in place."""
    engine.scheduler.pause("in_place").result(10)
    pending = engine.start([prompt], params(n, 1), **body)
    engine.scheduler._call(lambda: engine.batch.queue.admit(engine.batch.generation)).result(10)
    engine.scheduler._call(engine.batch._prefill).result(10)
    (entry,) = engine.batch.queue.prefills
    assert 0 < entry.done < len(prompt)
    return pending

"""The embedded engine without HTTP: the real scheduler thread on a real model, driven by plain calls."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from miles.data.end_tokens import read_end_tokens
from miles.rollout.engines.embedded.batch import Batch
from miles.rollout.engines.embedded.checkpoint import load_weights, read_config
from miles.rollout.engines.embedded.generate_body import parse_generate
from miles.rollout.engines.embedded.models import build_model
from miles.rollout.engines.embedded.requests import Job, Limits, Output, Refusal
from miles.rollout.engines.embedded.scheduler import Scheduler
from miles.rollout.engines.embedded.weight_state import BeginUpdate

WAIT_S = 30.0


def begin_body(engine: LocalEngine, version: int, *, run_id: str = "run") -> BeginUpdate:
    epoch = engine.scheduler.state.epoch
    return BeginUpdate(run_id, version, "all", "plan", "table", epoch, "retract", 60.0)


class LocalEngine:
    def __init__(self, folder: Path, **options: Any) -> None:
        config = read_config(folder)
        settings = {"max_running": 64, "max_total_tokens": 8192, "max_prefill_tokens": 512, "share_prefixes": True}
        torch.set_num_threads(1)
        self.model = build_model(config, dtype=torch.float32, device=torch.device("cpu"), context=None)
        load_weights(folder, self.model.parameters(), self.model.aliases())
        self.batch = Batch(self.model, version=0, **{**settings, **options})
        self.scheduler = Scheduler(self.batch)
        total = {**settings, **options}["max_total_tokens"]
        eos = read_end_tokens(folder).ids
        self.limits = Limits(self.model.vocab_size, self.model.context_length, total, eos)
        self._thread = threading.Thread(target=self.scheduler.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.scheduler.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def begin(self, version: int, *, run_id: str = "run") -> str:
        """Open an update on the engine; the session's token."""
        return self.scheduler.begin_update(begin_body(self, version, run_id=run_id), 0.0).token

    def start(self, prompts: list[list[int]], params: list[dict[str, Any]], **body: Any) -> Pending:
        requests, _ = parse_generate({"input_ids": prompts, "sampling_params": params, **body}, self.limits)
        finished = threading.Event()
        job = Job(requests, lambda _: finished.set())
        self.scheduler.submit(job)
        return Pending(job, finished)

    def generate(self, prompts: list[list[int]], params: list[dict[str, Any]], **body: Any) -> list[Output]:
        return self.start(prompts, params, **body).outputs()


class Pending:
    def __init__(self, job: Job, finished: threading.Event) -> None:
        self.job = job
        self._finished = finished

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    def results(self) -> list[Output | Refusal]:
        assert self._finished.wait(WAIT_S), "the engine did not settle the job"
        return self.job.results

    def outputs(self) -> list[Output]:
        results = self.results()
        assert all(isinstance(r, Output) for r in results), results
        return results

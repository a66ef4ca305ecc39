"""The processes of a run, one role each. Ray starts them; nothing here is imported by the driver's hot path.

Heavy libraries are loaded inside the methods, so that an actor exists at once and its imports run beside others'.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from miles.orchestrate.errors import RunError
from miles.orchestrate.network import use_interface_of
from miles.orchestrate.placement import LOOPBACK, Device

if TYPE_CHECKING:
    import numpy as np

    from miles.data.batch import RankBatch
    from miles.recipe import Recipe
    from miles.train.step_replay import ReplayReport


@dataclass(frozen=True)
class BundlePlace:
    """Where a step is recorded."""

    folder: Path
    step: int


def torch_device(device: Device) -> str:
    """The name of a placed device inside this actor: Ray shows an actor the GPU of its bundle and no other."""
    import ray

    if device.kind == "cpu":
        return "cpu"
    given = ray.get_gpu_ids()
    if len(given) != 1:
        raise RunError(f"Ray gave this actor the GPUs {given}, but its place is one GPU ({device})")
    return "cuda:0"


class TrainWorker:
    """One rank of the training mesh."""

    def __init__(self, recipe: Recipe, model_dir: Path, rank: int, device: Device) -> None:
        self._recipe, self._model_dir, self._rank, self._device = recipe, model_dir, rank, device
        self._listener: socket.socket | None = None
        self._backend: Any = None
        self._pusher: Any = None
        self._hook: Any = None

    def pid(self) -> int:
        return os.getpid()

    def offer_port(self, address: str) -> tuple[str, int]:
        """Listen on a free port of `address` for the mesh to meet at; called on rank 0 only."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        return address, self._listener.getsockname()[1]

    def start(self, address: str, port: int, checkpoints: Path) -> dict[str, Any]:
        """Join the mesh, load the newest checkpoint or the model folder.

        Returns `{"extra": the loop's state or None, "notes": [what was passed over], "dp_rank": int}`.
        """
        self._build(address, port)
        resumed = self._backend.load_checkpoint(checkpoints)
        if resumed is None:
            self._backend.load(self._model_dir)
        layout = self._backend.parallel_layout
        return {
            "extra": None if resumed is None else resumed.extra,
            "notes": [] if resumed is None else [f"{s.name}: {s.reason}" for s in resumed.skipped],
            "dp_rank": layout.dp_rank,
        }

    def _build(self, address: str, port: int) -> None:
        from miles.orchestrate.backends import build_backend
        from miles.quant.hook import FakeQATHook

        self._hook = FakeQATHook(
            self._recipe.quant, model_dir=self._model_dir, group=lambda: self._backend.mesh.expert_tp
        )
        if address != LOOPBACK:
            use_interface_of(address)
        self._backend = build_backend(
            self._recipe,
            self._model_dir,
            rank=self._rank,
            device=torch_device(self._device),
            address=address,
            port=port,
            listener=self._listener,
            install=self._hook,
        )
        self._backend.init()

    def connect(self, engine_urls: Sequence[str], run_id: str) -> None:
        """Open the weight sync to the engines; a no-op on ranks that do not send."""
        from miles.sync.session import WeightPusher

        if self._backend.parallel_layout.is_sync_rank:
            rounding = self._hook.rounding
            self._pusher = WeightPusher(engine_urls, self._recipe.sync, run_id=run_id, nvfp4=rounding)
        # What start-up made lives to the end: collections during the steps need not walk over it.
        gc.collect()
        gc.freeze()

    def advance(self, batches: Sequence[RankBatch], version: int, bundle: BundlePlace | None = None) -> dict[str, Any]:
        """One optimizer step for each batch, then the new weights to every engine as `version`; collective.

        Steps that changed nothing (`train/step_skipped`) send nothing. With `bundle`, the steps are recorded for
        `miles replay`. Returns the steps' merged metrics with `time/train` and `time/sync`, and the engines' states
        (on the sending rank).
        """
        from miles.train.steps import merge_steps

        start = time.perf_counter()
        steps = [self._step(batch, version, number, bundle) for number, batch in enumerate(batches)]
        metrics = merge_steps(steps)
        trained = time.perf_counter()
        engines = None if metrics["train/step_skipped"] else self.push(version)
        metrics |= {"time/train": trained - start, "time/sync": time.perf_counter() - trained}
        return {"metrics": metrics, "engines": engines}

    def _step(self, batch: RankBatch, version: int, number: int, bundle: BundlePlace | None) -> dict[str, float]:
        if bundle is None:
            metrics = self._backend.step(batch)
        else:
            from miles.train.step_replay import record_step

            # The first step of a rollout lies where its number says, later ones in a folder of their own.
            root = bundle.folder / f"optimizer_step_{number}" if number else bundle.folder
            metrics = record_step(self._backend, batch, root, step=bundle.step, manifest=self._manifest(version - 1))
        if not metrics["train/step_skipped"]:
            self._hook.after_step(len(batch.micro_batches))
        return metrics

    def log_probs(self, batch: RankBatch) -> list[np.ndarray]:
        """Log-probs of each sample's response under the current weights; collective."""
        return self._backend.log_probs(batch)

    def ref_log_probs(self, batch: RankBatch) -> list[np.ndarray]:
        """Log-probs under the frozen model that the run started from; collective."""
        return self._backend.ref_log_probs(batch)

    def teacher_log_probs(self, batch: RankBatch) -> list[np.ndarray]:
        """Log-probs under the teacher; collective."""
        return self._backend.teacher_log_probs(batch)

    def reference_support(self, batch: RankBatch) -> list[np.ndarray]:
        """The frozen model's log-probs of every id of the samples' sampling masks; collective."""
        return self._backend.reference_support(batch)

    def values(self, batch: RankBatch) -> list[np.ndarray]:
        """The critic's values before each response token; collective."""
        return self._backend.values(batch)

    def replay(self, address: str, port: int, folder: Path, mode: Literal["bit", "close"]) -> ReplayReport:
        """Join a fresh mesh and run the recorded step of `folder` again; collective."""
        from miles.train.step_replay import replay_step

        self._build(address, port)
        return replay_step(folder, self._backend, mode=mode)

    def _manifest(self, version: int) -> dict[str, Any]:
        return {
            "recipe": self._recipe.model_dump(mode="json"),
            "model_dir": str(self._model_dir),
            "seed": self._recipe.seed,
            "weight_version": version,
        }

    def push(self, version: int) -> dict[str, str] | None:
        """Send the current weights to every engine as `version`; collective. Engine URL -> state, on the sending rank."""
        weights = self._backend.state_for_sync()
        if self._pusher is None:
            for _ in weights:
                continue
            return None
        return dict(self._pusher.push(weights, version).engines)

    def save(self, directory: Path, extra: dict[str, Any]) -> str:
        """Write a checkpoint; collective, atomic."""
        return str(self._backend.save(directory, extra=extra))

    def export(self, directory: Path) -> None:
        """Write a Hugging Face folder; collective, atomic."""
        self._backend.export_hf(directory)

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
        if self._backend is not None:
            self._backend.close()
        if self._listener is not None:
            self._listener.close()


class EngineActor:
    """Owns one rollout engine process on its host."""

    def __init__(self, recipe: Recipe, model_dir: Path, index: int, device: Device, host: str, logs: Path) -> None:
        from miles.orchestrate.backends import start_engine

        self._config = recipe.engine
        self._starting: Any = None
        self._handle: Any = None
        self._failure: Exception | None = None
        try:
            self._config = recipe.engine.model_copy(update={"device": torch_device(device), "host": host})
            self._starting = start_engine(self._config, model_dir, log_path=logs / f"engine-{index}.log")
        except Exception as error:
            # Ray reports what a constructor raises as a dead actor, without the error's class: `ready` raises it.
            self._failure = error

    def ready(self) -> dict[str, Any]:
        """Wait until the engine listens; its URL and process id."""
        if self._failure is not None:
            raise self._failure
        self._handle = self._starting.wait_ready(self._config.start_timeout_s)
        return {"url": self._handle.url, "pid": self._handle.pid}

    def kill(self) -> None:
        engine = self._handle or self._starting
        if engine is not None:
            engine.kill()

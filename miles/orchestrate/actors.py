"""The processes of a run, one role each. Ray starts them; nothing here is imported by the driver's hot path.

Heavy libraries are loaded inside the methods, so that an actor exists at once and its imports run beside others'.
"""

from __future__ import annotations

import gc
import os
import socket
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
    from miles.train.backend import ScoreModel, ScoreOutput
    from miles.train.step_replay import ReplayReport


@dataclass(frozen=True)
class Recording:
    """Where a step is recorded for `miles replay`, and the version of the weights it begins with."""

    folder: Path
    step: int
    weight_version: int


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
        # Whether the last `train` made new weights; None before it and when it failed.
        self._made_weights: bool | None = None

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

    def connect(self, engine_urls: Sequence[str], run_id: str, token: str) -> None:
        """Open the weight sync to the engines, closing the one before; a no-op on ranks that do not send."""
        from miles.orchestrate.backends import engine_token
        from miles.sync.session import WeightPusher

        if self._pusher is not None:
            self._pusher.close()
        if self._backend.parallel_layout.is_sync_rank:
            rounding = self._hook.rounding
            engine = self._recipe.engine
            self._pusher = WeightPusher(
                engine_urls,
                self._recipe.sync,
                run_id=run_id,
                engine=engine.engine,
                token=engine_token(engine, token),
                nvfp4=rounding,
            )
        # What start-up made lives to the end: collections during the steps need not walk over it.
        gc.collect()
        gc.freeze()

    def train(self, batches: Sequence[RankBatch], recording: Recording | None = None) -> dict[str, float]:
        """One optimizer step for each batch; collective. Their merged metrics, with `train/step_skipped` 1 when the
        weights stay as they were. With `recording`, the steps are kept for `miles replay`."""
        from miles.train.steps import merge_steps

        self._made_weights = None
        metrics = merge_steps([self._step(batch, number, recording) for number, batch in enumerate(batches)])
        self._made_weights = not metrics["train/step_skipped"]
        return metrics

    def _step(self, batch: RankBatch, number: int, recording: Recording | None) -> dict[str, float]:
        if recording is None:
            metrics = self._backend.step(batch)
        else:
            from miles.train.step_replay import record_step

            # The first step of a rollout lies where its number says, later ones in a folder of their own.
            root = recording.folder / f"optimizer_step_{number}" if number else recording.folder
            manifest = self._manifest(recording.weight_version)
            metrics = record_step(self._backend, batch, root, step=recording.step, manifest=manifest)
        if not metrics["train/step_skipped"]:
            self._hook.after_step(len(batch.micro_batches))
        return metrics

    def score(self, batch: RankBatch, model: ScoreModel, output: ScoreOutput) -> list[np.ndarray]:
        """What `model` says of each sample of the batch (`Backend.score`); collective."""
        return self._backend.score(batch, model=model, output=output)

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

    def send_weights(self, version: int) -> dict[str, str] | None:
        """Send the current weights to every engine as `version`; collective. Engine URL -> state, on the sending rank."""
        weights = self._backend.state_for_sync()
        if self._pusher is None:
            for _ in weights:
                continue
            return None
        return dict(self._pusher.push(weights, version).engines)

    def send_trained(self, version: int) -> dict[str, str] | None:
        """`send_weights` of what the `train` before made; nothing is sent, and None returned, when it skipped its step.

        For a call that is issued before the result of `train` is known: `RunError` when that failed.
        """
        if self._made_weights is None:
            raise RunError(f"rank {self._rank} did not finish its step: no weights to send as version {version}")
        return self.send_weights(version) if self._made_weights else None

    def sleep(self) -> None:
        """Give up device memory that nothing holds, so that an engine on the device can have it."""
        self._backend.sleep()

    def wake(self) -> None:
        """Undo `sleep`: scores and steps come next."""
        self._backend.wake()

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

    def __init__(
        self, recipe: Recipe, model_dir: Path, index: int, device: Device, host: str, logs: Path, token: str
    ) -> None:
        from miles.orchestrate.backends import start_engine

        self._config = recipe.engine
        self._starting: Any = None
        self._handle: Any = None
        self._failure: Exception | None = None
        try:
            self._config = recipe.engine.model_copy(update={"device": torch_device(device), "host": host})
            self._starting = start_engine(self._config, model_dir, log_path=logs / f"engine-{index}.log", token=token)
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

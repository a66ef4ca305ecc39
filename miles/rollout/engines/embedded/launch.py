"""Start an embedded engine as its own process."""

from __future__ import annotations

from pathlib import Path

from miles.rollout.access import new_token
from miles.rollout.config import EngineConfig
from miles.rollout.engines.process import EngineHandle, StartingEngine, python_command


def start(
    config: EngineConfig,
    model_dir: Path,
    *,
    weight_version: int = 0,
    log_path: Path | None = None,
    token: str | None = None,
) -> StartingEngine:
    """Spawn and return at once; call `wait_ready` later. `log_path` None: messages go to this process's stderr.

    `token` is what the engine's routes want; without one a new one is made (`EngineHandle.token`).
    """
    command = [
        *python_command("miles.rollout.engines.embedded"),
        *("--config-json", config.model_dump_json()),
        *("--model", str(model_dir)),
        *("--weight-version", str(weight_version)),
    ]
    threads = str(config.threads)
    return StartingEngine(
        command,
        environment={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        log_path=log_path,
        token=token or new_token(),
    )


def launch(
    config: EngineConfig,
    model_dir: Path,
    *,
    weight_version: int = 0,
    log_path: Path | None = None,
    token: str | None = None,
) -> EngineHandle:
    """Start and wait until the engine listens, at most `config.start_timeout_s`."""
    starting = start(config, model_dir, weight_version=weight_version, log_path=log_path, token=token)
    return starting.wait_ready(config.start_timeout_s)

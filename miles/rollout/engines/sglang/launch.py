"""Start an SGLang server under our supervisor."""

from __future__ import annotations

from pathlib import Path

from miles.rollout.config import EngineConfig
from miles.rollout.engines.process import EngineHandle, StartingEngine, python_command
from miles.rollout.engines.sglang.arguments import PORTS, server_arguments


def start(
    config: EngineConfig, model_dir: Path, *, weight_version: int = 0, log_path: Path | None = None
) -> StartingEngine:
    """Spawn and return at once; `wait_ready` later (a server takes about a minute)."""
    server_arguments(config, model_dir, [0] * PORTS, weight_version=weight_version)  # refuses bad options here
    command = [
        *python_command("miles.rollout.engines.sglang"),
        *("--config-json", config.model_dump_json()),
        *("--model", str(model_dir)),
        *("--weight-version", str(weight_version)),
    ]
    return StartingEngine(command, environment={}, log_path=log_path)


def launch(
    config: EngineConfig, model_dir: Path, *, weight_version: int = 0, log_path: Path | None = None
) -> EngineHandle:
    """Start and wait until the server is healthy, at most `config.start_timeout_s`."""
    starting = start(config, model_dir, weight_version=weight_version, log_path=log_path)
    return starting.wait_ready(config.start_timeout_s)

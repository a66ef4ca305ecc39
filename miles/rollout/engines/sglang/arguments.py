"""The command line of an SGLang server for an `EngineConfig`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from miles.config import ConfigError
from miles.rollout.config import EngineConfig

# Set by us; as server_args they would contradict what the rest of the run believes.
RESERVED = frozenset(
    {"model-path", "host", "port", "nccl-port", "dist-init-addr", "weight-version", "custom-weight-loader"}
)
# Function of ours that takes a bucket of weights inside the server, as `load_format` of an update.
WEIGHT_LOADER = "miles_weight_loader.load"
# What SGLang needs on a machine without a GPU; each may be overruled by engine.server_args or engine.env.
CPU_ARGUMENTS: dict[str, object] = {
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,
}
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}
# The one folder of ours that the server's interpreter sees.
PLUGIN = Path(__file__).with_name("plugin")
# Every port that a server opens is leased: HTTP, NCCL, rendezvous.
PORTS = 3


def server_arguments(config: EngineConfig, model_dir: Path, ports: list[int], *, weight_version: int) -> list[str]:
    """Arguments after `python -m sglang.launch_server`. `ConfigError` for a reserved or ill-typed server argument."""
    http, nccl, rendezvous = ports
    arguments: dict[str, object] = {
        "model-path": str(model_dir),
        "host": config.host,
        "port": http,
        "nccl-port": nccl,
        "dist-init-addr": f"127.0.0.1:{rendezvous}",
        "weight-version": weight_version,
        "device": "cuda" if config.device.startswith("cuda") else config.device,
        "dtype": config.dtype,
        "max-running-requests": config.max_running,
        "max-total-tokens": config.max_total_tokens,
        "chunked-prefill-size": config.max_prefill_tokens,
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "custom-weight-loader": WEIGHT_LOADER,
    }
    if config.device == "cpu":
        arguments |= CPU_ARGUMENTS
    if config.context_length is not None:
        arguments["context-length"] = config.context_length
    if not config.prefix_cache:
        arguments["disable-radix-cache"] = True
    for name, value in config.server_args.items():
        key = name.lstrip("-").replace("_", "-")
        if key in RESERVED:
            raise ConfigError(f"engine.server_args.{name} is set by the run; remove it (see engine.host, engine.port)")
        if key == "api-key":
            raise ConfigError(
                f"engine.server_args.{name}: a key in a command line is everybody's on the host; keep engine.host on the loopback"
            )
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(f"engine.server_args.{name}: {value!r} is a {type(value).__name__}, expected one value")
        arguments[key] = value
    line: list[str] = []
    for key, value in arguments.items():
        if value is True:
            line.append(f"--{key}")
        elif value is not False:
            line += [f"--{key}", str(value)]
    return line


def server_python(config: EngineConfig) -> str:
    """The interpreter that SGLang runs in."""
    return config.python or sys.executable


def server_environment(config: EngineConfig, outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of the server. `outer` without the paths that were meant for our own interpreter."""
    paths = [str(PLUGIN)]
    if config.python is None and outer.get("PYTHONPATH"):
        paths.append(outer["PYTHONPATH"])
    threads = str(config.threads)
    ours = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if config.device == "cpu":
        ours |= CPU_ENVIRONMENT
    return {**outer, **ours, **config.env, "PYTHONPATH": os.pathsep.join(paths)}

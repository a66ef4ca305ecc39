"""Process of one embedded engine: `python -m miles.rollout.engines.embedded --settings JSON`.

Reports `{"url", "pid"}` or `{"error", "exit_code"}` as one JSON line on `--ready-fd`, and ends when its parent does.
The run's token, which every route but `/health` wants, comes by `--token-fd` or `--token-file`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles.rollout.engines.start_report import end_with_parent, say


def main() -> int:
    parser = argparse.ArgumentParser(prog="miles.rollout.engines.embedded")
    parser.add_argument("--config-json", required=True, help="EngineConfig as JSON")
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face model folder")
    parser.add_argument("--weight-version", type=int, default=0, help="version of the weights in the folder")
    parser.add_argument("--ready-fd", type=int, default=-1, help="file descriptor for the one-line report")
    parser.add_argument("--parent-pid", type=int, default=0, help="end when this parent is gone; 0: never")
    token = parser.add_mutually_exclusive_group(required=True)
    token.add_argument("--token-fd", type=int, help="file descriptor to read the run's token from")
    token.add_argument("--token-file", type=Path, help="file of mode 0600 with the run's token")
    args = parser.parse_args()
    end_with_parent(args.parent_pid)
    report = os.fdopen(args.ready_fd, "w") if args.ready_fd >= 0 else sys.stdout
    from miles.config import MilesError
    from miles.rollout import access
    from miles.rollout.config import EngineConfig
    from miles.rollout.http_server import listen

    try:
        token_given = access.read_file(args.token_file) if args.token_file else access.read_fd(args.token_fd)
        config = EngineConfig.model_validate_json(args.config_json)
        listener = listen(config.host, config.port, option="engine.port")
        server = _build(config, args.model, args.weight_version)
    except MilesError as error:
        say(report, {"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    return _serve(server, token_given, listener, report)


def _build(config: Any, model_dir: Path, weight_version: int) -> Any:
    from miles.data.end_tokens import read_end_tokens
    from miles.rollout.engines.embedded.checkpoint import load_weights, read_config

    hf_config = read_config(model_dir)  # before the import of torch: a wrong folder is reported at once
    import torch

    from miles.rollout.engines.embedded.batch import Batch
    from miles.rollout.engines.embedded.invariance import rows_are_independent
    from miles.rollout.engines.embedded.models import build_model
    from miles.rollout.engines.embedded.requests import Limits
    from miles.rollout.engines.embedded.scheduler import Scheduler
    from miles.rollout.engines.embedded.server import EngineServer

    torch.set_num_threads(config.threads)
    dtype, device = getattr(torch, config.dtype), _device(config.device)
    with torch.inference_mode(False), torch.no_grad():
        model = build_model(hf_config, dtype=dtype, device=device, context=config.context_length)
        load_weights(model_dir, model.parameters(), model.aliases())
        refresh = _packed_experts(config, model, model_dir)
        refresh()
        batch = Batch(
            model,
            max_running=config.max_running,
            max_total_tokens=config.max_total_tokens,
            max_prefill_tokens=config.max_prefill_tokens,
            share_prefixes=config.prefix_cache,
            version=weight_version,
        )
        invariant = dtype == torch.float32 and rows_are_independent(model.parameters().values())
    scheduler = Scheduler(batch, after_update=refresh)
    threading.Thread(target=scheduler.run, name="engine", daemon=True).start()
    eos = read_end_tokens(model_dir).ids
    limits = Limits(model.vocab_size, model.context_length, config.max_total_tokens, eos)
    info = {
        "engine": "embedded",
        "version": "1",
        "model_path": str(model_dir),
        "model_type": hf_config["model_type"],
        "vocab_size": model.vocab_size,
        "context_length": limits.context_length,
        "max_total_tokens": config.max_total_tokens,
        "max_running": config.max_running,
        "device": config.device,
        "dtype": config.dtype,
        "threads": config.threads,
        "eos_token_ids": list(eos),
        "batch_invariant": invariant,
    }
    return EngineServer(scheduler, limits, info)


def _packed_experts(config: Any, model: Any, model_dir: Path) -> Callable[[], object]:
    """What to call after the weights changed: pack the routed experts and compute with what they decode to."""
    from miles.quant.contract import check_rounding

    if config.nvfp4_experts is None:
        check_rounding(model_dir, None, where="start of the engine")
        return lambda: None
    from miles.quant.packed import PackedExperts
    from miles.rollout.errors import EngineModelError

    rounding = config.nvfp4_experts.resolve()
    scope = config.nvfp4_experts.scope(model.parameters(), {"num_hidden_layers": model.num_layers})
    check_rounding(model_dir, rounding, where="start of the engine", scope=scope)
    experts = PackedExperts(rounding, scope=scope)

    def refresh() -> None:
        if experts.refresh(model.parameters()) == 0:
            raise EngineModelError("engine.nvfp4_experts is set but the model has no routed experts; remove the option")

    return refresh


def _device(name: str) -> Any:
    import torch

    from miles.rollout.errors import EngineModelError

    try:
        device = torch.device(name)
    except RuntimeError:
        raise EngineModelError(f"engine.device {name!r} is no device; use cpu, cuda or cuda:N") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise EngineModelError(
            f"engine.device {name}: {count} GPU(s) are visible here; use engine.device=cpu or a device that exists"
        )
    return device


def _serve(server: Any, token: str, listener: socket.socket, report: Any) -> int:
    import uvicorn

    from miles.rollout.access import TokenRequired
    from miles.rollout.engines.embedded.connections import watched_protocol
    from miles.rollout.engines.embedded.weight_messages import MAX_TIMEOUT_S
    from miles.rollout.http_server import url_of

    class Server(uvicorn.Server):
        # An engine has nothing to save: it ends at once on a signal, whatever is running.
        def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]  # used as a context only
            return contextlib.nullcontext()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _: os._exit(128 + caught))
    config = uvicorn.Config(
        TokenRequired(server.app(), token),
        http=watched_protocol(server.weights.connection_closed),
        log_level="warning",
        access_log=False,
        lifespan="off",
        # An update ends with its connection: the server does not close one that an update may still be silent on.
        timeout_keep_alive=int(MAX_TIMEOUT_S) + 60,
        backlog=1024,
    )
    say(report, {"url": url_of(listener), "pid": os.getpid()})
    Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())

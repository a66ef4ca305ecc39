"""`miles serve engine` and `miles serve router`: run one in the foreground until interrupted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from miles.rollout import access
from miles.rollout.config import EngineConfig, RouterConfig


def serve_engine(
    config: EngineConfig, model_dir: Path, *, weight_version: int = 0, token_file: Path | None = None
) -> int:
    """The embedded engine on `config.host:port`; prints {"url", "pid"} as one JSON line. Returns the exit code.

    Clients send the token in `token_file` (mode 0600); without one, a new token's file is named on stderr.
    """
    if token_file is None:
        with access.token_file(access.new_token()) as token_file:
            print(f"token: {token_file}", file=sys.stderr, flush=True)
            return serve_engine(config, model_dir, weight_version=weight_version, token_file=token_file)
    command = [sys.executable, "-m", "miles.rollout.engines.embedded", "--config-json", config.model_dump_json()]
    command += ["--model", str(model_dir), "--weight-version", str(weight_version)]
    command += ["--token-file", str(token_file)]
    try:
        return subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return 130


def serve_router(config: RouterConfig, workers: Sequence[str], *, token_file: Path) -> int:
    """A router over engines at `workers`; prints {"url"} as one JSON line. One token for it and its engines."""
    import json

    import uvicorn

    from miles.rollout.http_server import listen, url_of
    from miles.rollout.router import Router

    token = access.read_file(token_file)
    listener = listen(config.host, config.port, option="router.port")
    print(json.dumps({"url": url_of(listener)}), flush=True)
    app = Router(config, workers, token=token).app()
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on")).run(sockets=[listener])
    return 0

"""`miles serve`: one engine, or a router over several, in the foreground. Mounted by `miles.cli`.

Each prints one JSON line with its address once it answers, and serves until it is interrupted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

INTERRUPTED = 130

serve_app = typer.Typer(name="serve", help="Serve an engine or a router over HTTP.", no_args_is_help=True)

SetOpt = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="an option of the section, e.g. --set port=30000")
]
TokenOpt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="file of mode 0600 with the token that every route but /health wants"),
]


@serve_app.command("engine")
def engine(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face model folder")],
    overrides: SetOpt = None,
    weight_version: Annotated[int, typer.Option(min=0, help="the version that the folder's weights are")] = 0,
    token_file: TokenOpt = None,
) -> None:
    """Serve a model by the options of a recipe's engine section (`--set engine=sglang` for an SGLang server)."""
    from miles.config import ConfigError
    from miles.config.overrides import from_overrides
    from miles.rollout.access import read_file
    from miles.rollout.config import EngineConfig
    from miles.rollout.engines.embedded import launch as launch_embedded
    from miles.rollout.engines.sglang import launch as launch_sglang

    config = from_overrides(EngineConfig, overrides or [])
    if config.engine == "embedded" and token_file is None:
        raise ConfigError("--token-file: the embedded engine answers only who has its token; name a file with one")
    if config.engine != "embedded" and token_file is not None:
        raise ConfigError(f"--token-file: an engine of kind {config.engine} asks for no token; leave it out")
    if token_file is None:
        handle = launch_sglang(config, model, weight_version=weight_version)
    else:
        handle = launch_embedded(config, model, weight_version=weight_version, token=read_file(token_file))
    with handle:
        typer.echo(json.dumps({"url": handle.url, "pid": handle.pid}))
        try:
            code = handle.wait()
        except KeyboardInterrupt:
            code = INTERRUPTED
    raise typer.Exit(code)


@serve_app.command("router")
def router(
    workers: Annotated[list[str], typer.Argument(metavar="URL...", help="engines to spread requests over")],
    overrides: SetOpt = None,
    token_file: TokenOpt = None,
) -> None:
    """Serve one address over several engines: spreading, health, affinity of sessions."""
    import uvicorn

    from miles.config.overrides import from_overrides
    from miles.rollout.access import read_file
    from miles.rollout.config import RouterConfig
    from miles.rollout.http_server import listen, url_of
    from miles.rollout.router import Router

    config = from_overrides(RouterConfig, overrides or [])
    listener = listen(config.host, config.port, option="router.port")
    typer.echo(json.dumps({"url": url_of(listener)}))
    app = Router(config, workers, token=None if token_file is None else read_file(token_file)).app()
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on")).run(sockets=[listener])

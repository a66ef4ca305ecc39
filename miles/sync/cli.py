"""`miles sync`: what an engine holds, looked at from outside. Mounted by `miles.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

sync_app = typer.Typer(name="sync", help="Look at weights inside engines.", no_args_is_help=True)


@sync_app.callback()
def sync() -> None:
    """Look at weights inside engines."""


@sync_app.command("diff")
def diff(
    url: Annotated[str, typer.Argument(metavar="URL", help="the engine's address, e.g. http://127.0.0.1:30000")],
    checkpoint: Annotated[Path, typer.Option(metavar="DIR", help="Hugging Face model folder to compare with")],
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file of mode 0600 with the token that the engine wants")
    ] = None,
) -> None:
    """Compare every weight that an engine holds with a checkpoint, by digest; exit code 1 when any differs."""
    from miles.rollout.access import read_file
    from miles.sync.diff import diff_engine

    found = diff_engine(url, checkpoint, token=None if token_file is None else read_file(token_file))
    typer.echo(f"{url}: version {found.version} ({found.state}), {found.equal} equal, {len(found.differing)} differ")
    for name in found.differing:
        typer.echo(name)
    if found.differing:
        raise typer.Exit(1)

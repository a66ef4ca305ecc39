"""`miles`: train, check recipes, look at the machine. Commands import what they need, so that help is instant."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from miles.config import environment
from miles.config.errors import ConfigError, MilesError
from miles.quant.cli import convert_app
from miles.rollout.cli import serve_app
from miles.sync.cli import sync_app

INTERRUPTED = 130

app = typer.Typer(
    name="miles",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM post-training by reinforcement learning, from a bare CPU to a GPU cluster.",
)
recipe_app = typer.Typer(no_args_is_help=True, help="Look at recipes without starting anything.")
app.add_typer(recipe_app, name="recipe")
app.add_typer(convert_app, name="convert")
app.add_typer(serve_app, name="serve")
app.add_typer(sync_app, name="sync")

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="recipe file, e.g. recipes/quickstart.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key, e.g. --set train.parallel.tp=2")
]


class _RunConsole(Console):
    """rich would end the process without a word when the reader of its output goes away."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _end_as_interrupted() -> None:
    """A scheduler's polite stop and a closed terminal are handled like Ctrl-C: everything is taken down, nothing finished
    is lost. `nohup` keeps its meaning."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(*_: object) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell script starts its background commands deaf to Ctrl-C; a polite stop is still meant for them.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="remove an earlier run of this name first")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything and print the plan; start nothing")
    ] = False,
) -> None:
    """Train by a recipe; run the same command again to resume after a kill."""
    from miles.recipe import load

    console = _RunConsole()
    loaded = load(recipe, overrides or [])
    if dry_run:
        from miles.orchestrate.dry_run import describe

        describe(loaded, overrides or [], console)
        return
    from miles.orchestrate.train import train as run

    _end_as_interrupted()
    try:
        outcome = run(loaded, overrides or [], fresh=fresh, console=console)
    except KeyboardInterrupt:
        typer.echo("interrupted; run the same command again to resume", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - the interpreter flushes it at its end
        typer.echo("error: what read the output has ended; run the same command again to resume", err=True)
        raise typer.Exit(1) from None
    console.print(outcome.line, highlight=False, soft_wrap=True)


@app.command("eval")
def evaluate(
    recipe: RecipePath,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="a Hugging Face model folder")] = None,
    checkpoint: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="the recipe's run after N steps, e.g. of run.keep_best")
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Evaluate the sets of a recipe (eval.sets) without training."""
    import contextlib
    import json

    from miles.orchestrate import eval_command
    from miles.recipe import load

    if (model is None) == (checkpoint is None):
        raise ConfigError("name either --model DIR or --checkpoint N: what to evaluate")
    loaded = load(recipe, overrides or [])
    _end_as_interrupted()
    try:
        with contextlib.ExitStack() as stack:
            if checkpoint is not None:
                model = stack.enter_context(eval_command.checkpoint_model(loaded, overrides or [], checkpoint))
            assert model is not None
            metrics = eval_command.evaluate(loaded, model, warn=lambda text: typer.echo(text, err=True))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(metrics))
    else:
        eval_command.show(metrics, Console())


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a recorded step, e.g. runs/NAME/replay/step_3")],
    mode: Annotated[str, typer.Option(help="bit: identical bits; close: loss and gradient norm agree")] = "bit",
    rank: Annotated[int | None, typer.Option(help="report one rank only")] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="the run's model folder, when it is not where it was")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Run one recorded optimizer step again and compare it with what was recorded."""
    from miles.orchestrate.replay_command import replay as run

    run(folder, mode=mode, rank=rank, console=Console(), model=model, overrides=overrides or [])


@app.command()
def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder, e.g. runs/quickstart")],
    step: Annotated[int | None, typer.Option(min=0, help="of this step; without it the newest")] = None,
    best: Annotated[bool, typer.Option("--best", help="highest rewards first, of all steps unless --step")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="lowest rewards first, of all steps unless --step")] = False,
    limit: Annotated[int, typer.Option(min=1, help="how many")] = 8,
) -> None:
    """Print what the model wrote, with rewards."""
    from miles.observe.samples_view import show

    if best and worst:
        raise ConfigError("--best and --worst exclude each other; give one of them")
    show(run, Console(), step=step, order="best" if best else "worst" if worst else None, limit=limit)


@app.command()
def doctor() -> None:
    """Say what this machine has, what will run on it, and why the rest will not."""
    from miles.orchestrate.doctor import report

    report(Console())


@recipe_app.command("check")
def recipe_check(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Load a recipe, apply every rule, look whether this machine can run it, and say what is wrong; starts nothing."""
    from miles.orchestrate.startable import check_place, check_start
    from miles.recipe import digest, load

    loaded = load(recipe, overrides or [])
    findings = check_start(loaded)
    check_place(loaded)
    for finding in findings:
        typer.echo(f"{finding.severity}: {finding}")
    typer.echo(f"{recipe}: ok, digest {digest(loaded)[:16]}")


@recipe_app.command("show")
def recipe_show(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Print the resolved recipe as YAML: every key with its value."""
    import yaml

    from miles.recipe import load

    typer.echo(yaml.safe_dump(load(recipe, overrides or []).model_dump(mode="json"), sort_keys=False), nl=False)


@recipe_app.command("diff")
def recipe_diff(left: RecipePath, right: RecipePath) -> None:
    """Print the resolved differences of two recipes."""
    from miles.recipe import load
    from miles.recipe.schema import differences

    for line in differences(load(left), load(right)):
        typer.echo(line)


@recipe_app.command("explain")
def recipe_explain(rule: Annotated[str | None, typer.Argument(help="a rule's id; all when left out")] = None) -> None:
    """Say why a rule exists."""
    from miles.config.names import suggestion
    from miles.recipe.rules import RULES

    reasons = {known.id: known.reason for known in RULES}
    if rule is not None and rule not in reasons:
        raise ConfigError(f"rule {rule} is not known; {suggestion(rule, reasons)}")
    for name in reasons if rule is None else [rule]:
        typer.echo(f"{name}: {reasons[name]}")


@recipe_app.command("list")
def recipe_list(folder: Annotated[Path, typer.Argument(help="folder of recipes")] = Path("recipes")) -> None:
    """List the recipes of a folder with their status."""
    from miles.recipe import load

    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise ConfigError(f"{folder}: no *.yaml recipe here")
    for path in paths:
        loaded = load(path)
        typer.echo(f"{path}  [{loaded.validation.status}]  {loaded.description}")


@convert_app.command("hf-to-mcore")
def hf_to_mcore(
    source: Annotated[Path, typer.Argument(help="Hugging Face model folder")],
    target: Annotated[Path, typer.Argument(help="checkpoint folder to write iter_0 to")],
) -> None:
    """Write a Hugging Face model as step 0 of a run; any mesh loads it."""
    from miles.train.convert import hf_to_checkpoint

    typer.echo(f"wrote {hf_to_checkpoint(source, target)}")


@convert_app.command("mcore-to-hf")
def mcore_to_hf(
    source: Annotated[Path, typer.Argument(help="checkpoint folder of a run, or one iter_<n>")],
    target: Annotated[Path, typer.Argument(help="Hugging Face folder to write")],
    tokenizer: Annotated[Path | None, typer.Option(help="folder to take tokenizer files from")] = None,
) -> None:
    """Write the policy of a training checkpoint as a Hugging Face model."""
    from miles.train.convert import checkpoint_to_hf

    typer.echo(f"wrote {checkpoint_to_hf(source, target, tokenizer_dir=tokenizer)}")


@convert_app.command("mcore-to-nvfp4")
def mcore_to_nvfp4(
    source: Annotated[Path, typer.Argument(help="checkpoint folder of a run with fake quantisation, or one iter_<n>")],
    target: Annotated[Path, typer.Argument(help="folder to write; empty")],
    tokenizer: Annotated[Path | None, typer.Option(help="folder to take tokenizer files from")] = None,
) -> None:
    """Pack the policy of a checkpoint in NVFP4 with the rounding that it was trained with."""
    from miles.train.convert import checkpoint_to_nvfp4

    typer.echo(f"wrote {checkpoint_to_nvfp4(source, target, tokenizer_dir=tokenizer)}")


def main() -> None:
    """Entry point: errors of ours print their text and exit with their code."""
    try:
        environment.refuse_unknown()
        app(standalone_mode=True)
    except MilesError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

"""`miles convert`: checkpoint conversions that say what they lost. Mounted by `miles.cli` as a sub-application.

Torch is imported by the commands, not here.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from miles.kernels.nvfp4_qdq.config import NVFP4QDQConfig

INTERRUPTED, TERMINATED = 130, 143

convert_app = typer.Typer(name="convert", help="Convert checkpoints between number formats.", no_args_is_help=True)

SourceArg = Annotated[Path, typer.Argument(help="Checkpoint directory to read.")]
TargetArg = Annotated[Path, typer.Argument(help="Directory to write; empty, or with --resume an interrupted run's.")]
ResumeOpt = Annotated[bool, typer.Option("--resume", help="Continue an interrupted conversion.")]
IgnoreOpt = Annotated[
    list[str], typer.Option("--ignore", help="Keep in bf16: a name, a prefix ending in a dot, or re:PATTERN.")
]
FirstOpt = Annotated[
    int, typer.Option("--bf16-first-layers", min=0, help="Decoder layers to keep in bf16 at the start.")
]
LastOpt = Annotated[int, typer.Option("--bf16-last-layers", min=0, help="Decoder layers to keep in bf16 at the end.")]
FourOpt = Annotated[bool, typer.Option("--4over6", help="Choose per block between mapping the maximum to 6 or to 4.")]
MaxOpt = Annotated[int, typer.Option("--e4m3-max", help="448, or 256 with --4over6.")]
DomainOpt = Annotated[bool, typer.Option("--fp16-domain", help="Compare 4over6 errors in the fp16 domain.")]


class OnLoss(StrEnum):
    fail = "fail"
    mxfp8 = "mxfp8"
    report = "report"


class ErrorSum(StrEnum):
    MAE = "MAE"
    MSE = "MSE"


class Decode(StrEnum):
    te = "te"
    stored = "stored"


class Scale(StrEnum):
    fp32 = "fp32"
    e8m0 = "e8m0"


class Fp8Scope(StrEnum):
    linears = "linears"
    experts = "experts"


ErrorOpt = Annotated[ErrorSum, typer.Option("--error-mode", help="How a block's errors are summed for 4over6.")]
DecodeOpt = Annotated[Decode, typer.Option("--decode", help="Which decode the contract promises.")]


class _Terminated(BaseException):
    """SIGTERM came; like KeyboardInterrupt no error, so that nothing but the clean-up catches it."""


def _terminated(signal_number: int, frame: object) -> None:
    raise _Terminated


def _run(convert: Callable[[], dict], target: Path) -> None:
    """Convert and say what was done; Ctrl-C and SIGTERM clean up and say how to go on."""
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        report = convert()
    except (KeyboardInterrupt, _Terminated) as stop:
        typer.echo("interrupted; finished shards are kept: run the same command with --resume", err=True)
        raise typer.Exit(TERMINATED if isinstance(stop, _Terminated) else INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    if report.get("already_complete"):
        typer.echo(f"{target}: already complete, every shard is as it was written")
        return
    if folders := report.get("folders_not_copied"):
        typer.echo(f"not copied, folders of the source: {', '.join(folders)}", err=True)
    if files := report.get("files_not_in_the_index"):
        typer.echo(f"not converted, files that the source's index does not list: {', '.join(files)}", err=True)
    totals = report["totals"]
    lost = f"largest error {totals['max_abs_error']:.3g}"
    if totals["lossy_tiles"] is not None:
        lost = f"{totals['lossy_tiles']} of {totals['tiles']} tiles lossy"
    typer.echo(
        f"{target}: {totals['tensors']} tensors converted, {lost}, "
        f"{totals['bytes_in'] / 1e9:.3f} GB in, {totals['bytes_out'] / 1e9:.3f} GB out, {totals['gigabytes_per_second']} GB/s"
    )


def _config(four: bool, e4m3_max: int, mode: ErrorSum, fp16: bool, decode: Decode) -> NVFP4QDQConfig:
    from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
    from miles.quant.errors import QuantConfigError

    if mode is ErrorSum.MSE and not four:
        raise QuantConfigError("--error-mode MSE needs --4over6: only the 4over6 choice compares errors")
    try:
        return NVFP4QDQConfig(four, e4m3_max, ErrorMode(mode.value), fp16, decode.value)
    except ValueError as error:
        raise QuantConfigError(f"--4over6, --e4m3-max, --error-mode, --fp16-domain: {error}") from error


@convert_app.command("mxfp4-to-fp8")
def mxfp4_to_fp8(
    source: SourceArg,
    target: TargetArg,
    on_loss: Annotated[
        OnLoss, typer.Option(help="fail: write nothing; mxfp8: keep such weights exact; report: accept.")
    ] = OnLoss.fail,
    resume: ResumeOpt = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda: same bytes.")] = "cpu",
) -> None:
    """MXFP4 experts to FP8 with 128x128 power-of-two scales; proves per tile whether anything rounds."""
    from miles.quant.convert.mxfp4_to_fp8 import convert

    _run(lambda: convert(source, target, on_loss=on_loss.value, resume=resume, device=device), target)


def _nvfp4_command(kind: Literal["bf16-to-nvfp4", "requantise"], text: str) -> None:
    """Two commands with the same options."""

    @convert_app.command(kind, help=text)
    def command(
        source: SourceArg,
        target: TargetArg,
        four_over_six: FourOpt = False,
        e4m3_max: MaxOpt = 448,
        error_mode: ErrorOpt = ErrorSum.MAE,
        fp16_domain: DomainOpt = False,
        decode: DecodeOpt = Decode.te,
        ignore: IgnoreOpt = [],  # noqa: B006  (typer copies it)
        bf16_first_layers: FirstOpt = 0,
        bf16_last_layers: LastOpt = 0,
        resume: ResumeOpt = False,
    ) -> None:
        from miles.quant.convert.to_nvfp4 import convert

        config = _config(four_over_six, e4m3_max, error_mode, fp16_domain, decode)
        edges = {"bf16_first_layers": bf16_first_layers, "bf16_last_layers": bf16_last_layers}
        _run(lambda: convert(source, target, kind=kind, config=config, ignore=ignore, resume=resume, **edges), target)


_nvfp4_command("bf16-to-nvfp4", "Routed experts to NVFP4; gate and up share one tensor maximum.")
_nvfp4_command(
    "requantise", "NVFP4 again, to a contract: for checkpoints without one, or with quantised shared experts."
)


@convert_app.command("bf16-to-fp8")
def bf16_to_fp8(
    source: SourceArg,
    target: TargetArg,
    scale: Annotated[Scale, typer.Option(help="fp32, or e8m0 (rounded up to a power of two).")] = Scale.fp32,
    scope: Annotated[Fp8Scope, typer.Option(help="All 2-D projections, or routed experts.")] = Fp8Scope.linears,
    ignore: IgnoreOpt = [],  # noqa: B006  (typer copies it)
    resume: ResumeOpt = False,
) -> None:
    """2-D projections to FP8 E4M3 with 128x128 scales."""
    from miles.quant.convert.bf16_to_fp8 import convert

    _run(lambda: convert(source, target, scale=scale.value, scope=scope.value, ignore=ignore, resume=resume), target)


@convert_app.command("fp8-to-mxfp8")
def fp8_to_mxfp8(source: SourceArg, target: TargetArg, resume: ResumeOpt = False) -> None:
    """FP8 with power-of-two 128x128 scales to MXFP8: exact."""
    from miles.quant.convert.fp8_to_mxfp8 import convert

    _run(lambda: convert(source, target, resume=resume), target)


@convert_app.command("check")
def check(
    checkpoint: SourceArg,
    against: Annotated[Path | None, typer.Option(help="Another checkpoint whose contract must be equal.")] = None,
    accept_legacy: Annotated[
        Path | None, typer.Option(help="JSON file with the contract's fields, for a checkpoint without one.")
    ] = None,
    whole: Annotated[bool, typer.Option("--bytes", help="Read every shard and compare it with the journal.")] = False,
) -> None:
    """Print a checkpoint's quantisation contract, and compare it with another's."""
    from miles.quant import contract
    from miles.quant.headers import read_json

    found = contract.read(checkpoint, legacy=read_json(accept_legacy) if accept_legacy else None)
    if against is not None:
        contract.require_equal(contract.read(against), found, where=str(checkpoint))
    if whole:
        from miles.quant.convert.journal import check_shards

        typer.echo(f"{check_shards(checkpoint)} shards are as they were written", err=True)
    typer.echo(found.canonical())

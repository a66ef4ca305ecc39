"""What differs between machines for the megatron-core backend: device, collectives, and the CPU shim.

megatron-core assumes CUDA in a few places. `apply_cpu_shim` replaces exactly the symbols of
`miles.train.megatron.cpu_shim.SYMBOLS`, once, at worker start; it refuses a megatron-core version that they were not
verified for and a process in which CUDA is already in use. Nothing else in Miles patches megatron-core, except
`define_missing_names` on machines without Transformer Engine.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata

import torch

from miles.train.errors import PlatformError
from miles.train.megatron.cpu_shim import DURING_BUILD, DURING_IMPORT, SYMBOLS, VERIFIED, Symbol

# Set on every machine without Transformer Engine, GPU or not.
MISSING_NAMES = (
    Symbol("moe_utils.te_general_gemm", "the router reads a name that only Transformer Engine defines", ("0.16.1",)),
)

_applied: tuple[Symbol, ...] = ()


@dataclass(frozen=True)
class Platform:
    """Device of this rank and the collective backend that serves it."""

    device: torch.device
    collectives: str

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"


def megatron_version() -> str:
    """Installed megatron-core version."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise PlatformError("megatron-core is not installed; install the package 'megatron-core'") from None


def choose_platform(device: str) -> Platform:
    """The platform of the device that the placement gave: `cpu` or `cuda:N`, N among those that this process sees."""
    chosen = torch.device(device)
    if chosen.type == "cpu":
        return Platform(chosen, "gloo")
    count = torch.cuda.device_count()
    if chosen.type != "cuda" or chosen.index is None or chosen.index >= count:
        raise PlatformError(f"this rank was placed on {device}, but it sees {count} GPUs; use train.device=cpu or auto")
    torch.cuda.set_device(chosen)
    return Platform(chosen, "nccl")


def apply_cpu_shim() -> tuple[Symbol, ...]:
    """Replace this version's symbols in this process and return them; applying twice does nothing."""
    global _applied
    version = megatron_version()
    if version not in VERIFIED:
        raise PlatformError(
            f"the CPU shim was verified for megatron-core {', '.join(VERIFIED)}, installed is {version}; "
            "install a verified version or train on a GPU"
        )
    if torch.cuda.is_initialized():
        raise PlatformError("CUDA is already in use in this process; the CPU shim may only run in a CPU worker")
    if not _applied:
        import_core_for_cpu()
        chosen = tuple(symbol for symbol in SYMBOLS if version in symbol.versions)
        for symbol in chosen:
            symbol.replace()
        _applied = (*chosen, DURING_IMPORT, DURING_BUILD)
    return _applied


def define_missing_names() -> tuple[Symbol, ...]:
    """Define `MISSING_NAMES` as None in a verified version without Transformer Engine; returns what was set."""
    if megatron_version() not in MISSING_NAMES[0].versions:
        return ()
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "te_general_gemm"):
        return ()
    moe_utils.te_general_gemm = None
    return MISSING_NAMES


def quiet_import_warnings() -> None:
    """megatron-core warns that Transformer Engine and Apex are absent, and of its own default for CUDA graphs."""
    for message in (".*Transformer Engine.*", ".*Apex.*", ".*grouped_gemm.*", "full scope is deprecated.*"):
        warnings.filterwarnings("ignore", message=message)


def import_core_for_cpu() -> None:
    """Import megatron-core with `torch.compile` as the identity; a process that imported it before keeps its fusions."""
    if "megatron.core" in sys.modules:
        return
    quiet_import_warnings()
    with DURING_IMPORT.replaced(), _hidden("wandb"):
        import megatron.core.models.gpt  # noqa: F401


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """megatron-core's inference imports W&B wherever it is installed: a third of a second, and no trainer uses it."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


@contextmanager
def building(platform: Platform) -> Iterator[None]:
    """Wrap the construction of a model: on a CPU, tensors that ask to move to 'cuda' stay where they are."""
    if not platform.is_cpu:
        yield
        return
    with DURING_BUILD.replaced():
        yield

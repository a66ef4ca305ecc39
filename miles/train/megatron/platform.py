"""What differs between machines for the megatron-core backend: device, collectives, and the CPU shim.

megatron-core assumes CUDA in a few places. `apply_cpu_shim` replaces exactly the symbols listed in
`CPU_SYMBOLS`, once, at worker start; it refuses a megatron-core version it was not verified for and a process
in which CUDA is already in use. Nothing else in Miles patches megatron-core.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from miles.train.errors import PlatformError


@dataclass(frozen=True)
class Platform:
    """Device of this rank and the collective backend that serves it."""

    device: torch.device
    collectives: str

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"


@dataclass(frozen=True)
class Symbol:
    """One replaced symbol: where, why, and the megatron-core versions for which the replacement was verified."""

    name: str
    reason: str
    versions: tuple[str, ...]


CPU_SYMBOLS = (
    Symbol(
        "torch.compile",
        "only while megatron-core is imported: its fusions would load the compiler (2 s) and compile on first use",
        ("0.16.1",),
    ),
    Symbol("torch.cuda.current_device", "parameters and buffers are created on 'the current device'", ("0.16.1",)),
    Symbol("torch.cuda.synchronize", "pipeline stages wait for the device after exchanging shapes", ("0.16.1",)),
    Symbol("schedules.torch", "pipeline schedules create a token counter on device 'cuda'", ("0.16.1",)),
    Symbol(
        "torch.Tensor.cuda",
        "only while a model is built: a tied embedding is moved to 'cuda' before its stages agree on it",
        ("0.16.1",),
    ),
    Symbol("random._get_cuda_rng_state", "recompute keeps the CUDA generator's state beside the CPU's", ("0.16.1",)),
    Symbol("random._set_cuda_rng_state", "recompute restores it", ("0.16.1",)),
    Symbol(
        "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
        "a CUDA stream is created when the first dispatcher is built",
        ("0.16.1",),
    ),
    Symbol(
        "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
        "split sizes are fetched over a CUDA stream; on a CPU they only change their type",
        ("0.16.1",),
    ),
)

# Set on every machine without Transformer Engine, GPU or not.
MISSING_NAMES = (
    Symbol("moe_utils.te_general_gemm", "the router reads a name that only Transformer Engine defines", ("0.16.1",)),
)

_applied = False


def megatron_version() -> str:
    """Installed megatron-core version."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise PlatformError("megatron-core is not installed; install the package 'megatron-core'") from None


def choose_platform(device: str, local_rank: int = 0) -> Platform:
    """`auto` takes a GPU if one is visible. Asking for cuda without one is an error."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise PlatformError("train.device is cuda but no GPU is visible; use train.device=cpu or auto")
    if device == "cpu" or not available:
        return Platform(torch.device("cpu"), "gloo")
    torch.cuda.set_device(local_rank)
    return Platform(torch.device("cuda", local_rank), "nccl")


def apply_cpu_shim() -> tuple[Symbol, ...]:
    """Replace `CPU_SYMBOLS` in this process and return them; applying twice does nothing."""
    global _applied
    version = megatron_version()
    for symbol in CPU_SYMBOLS:
        if version not in symbol.versions:
            raise PlatformError(
                f"the CPU shim for {symbol.name} was verified for megatron-core {', '.join(symbol.versions)}, "
                f"installed is {version}; install a verified version or train on a GPU"
            )
    if torch.cuda.is_initialized():
        raise PlatformError("CUDA is already in use in this process; the CPU shim may only run in a CPU worker")
    if not _applied:
        import_core_for_cpu()
        cpu = torch.device("cpu")
        _replace(torch.cuda, "current_device", lambda: cpu)
        _replace(torch.cuda, "synchronize", lambda device=None: None)
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.tensor_parallel import random as core_random
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

        _replace(schedules, "torch", _TorchOnCpu())
        _replace(core_random, "_get_cuda_rng_state", lambda *_, **__: None)
        _replace(core_random, "_set_cuda_rng_state", lambda *_, **__: None)
        _replace(Dispatcher, "cuda_dtoh_stream", _NoStream())
        _replace(Dispatcher, "_maybe_dtoh_and_synchronize", _splits_as_numpy)
        _applied = True
    return CPU_SYMBOLS


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
    """megatron-core warns at import that Transformer Engine and Apex are absent; on CPU that is expected."""
    for message in (".*Transformer Engine.*", ".*Apex.*", ".*grouped_gemm.*"):
        warnings.filterwarnings("ignore", message=message)


def import_core_for_cpu() -> None:
    """Import megatron-core with `torch.compile` as the identity; a process that imported it before keeps its fusions."""
    if "megatron.core" in sys.modules:
        return
    compile_ = torch.compile
    _replace(torch, "compile", lambda function=None, **_: function if function is not None else lambda inner: inner)
    try:
        quiet_import_warnings()
        import megatron.core.models.gpt  # noqa: F401
    finally:
        torch.compile = compile_


@contextmanager
def building(platform: Platform) -> Iterator[None]:
    """Wrap the construction of a model: on a CPU, tensors that ask to move to 'cuda' stay where they are."""
    if not platform.is_cpu:
        yield
        return
    original = torch.Tensor.cuda
    _replace(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        torch.Tensor.cuda = original  # type: ignore[method-assign]


class _TorchOnCpu:
    """`torch` as megatron-core's schedules see it: their counters on device 'cuda' go to the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **options)


class _NoStream:
    """Stands where megatron-core keeps a CUDA stream that nothing uses on a CPU."""


def _splits_as_numpy(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """The all-to-all takes its split sizes as host arrays; they are ready as soon as they are computed."""
    if point == dispatcher.cuda_dtoh_point and not dispatcher.drop_and_pad:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(dispatcher, name)
            if torch.is_tensor(value):
                setattr(dispatcher, name, value.numpy())
    return tokens_per_expert


def _replace(owner: Any, name: str, value: Any) -> None:
    if not hasattr(owner, name):
        raise PlatformError(
            f"{owner.__name__}.{name} no longer exists in this torch version; the CPU shim must be revised"
        )
    setattr(owner, name, value)

"""Every symbol that the CPU shim replaces: where, why, for which megatron-core versions, and by what.

Replacing is done by `platform`; importing this module changes nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from miles.train.errors import PlatformError

VERIFIED = ("0.16.1", "0.19.2")


@dataclass(frozen=True)
class Symbol:
    """`path` is "module:attribute", dotted below the module; `make` returns the replacement."""

    name: str
    reason: str
    versions: tuple[str, ...] = VERIFIED
    path: str = ""
    make: Callable[[], Any] | None = None

    def replace(self) -> Any:
        """Put the replacement in place; returns what stood there. A vanished symbol is an error."""
        module_name, _, attributes = self.path.partition(":")
        owner: Any = importlib.import_module(module_name)
        *parents, last = attributes.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        if not hasattr(owner, last) or self.make is None:
            raise PlatformError(f"{self.name} no longer exists in this version; the CPU shim must be revised")
        original = getattr(owner, last)
        setattr(owner, last, self.make())
        return original

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace for the duration of a block."""
        original = self.replace()
        try:
            yield
        finally:
            Symbol(self.name, self.reason, path=self.path, make=lambda: original).replace()


class _NoStream:
    """Stands where megatron-core keeps a CUDA stream that nothing uses on a CPU."""

    def wait_event(self, event: Any) -> None:
        """Work on a CPU is done when it was issued."""


class _TorchOnCpu:
    """`torch` as one megatron-core module sees it: counters on device 'cuda' go to the CPU, no streams exist."""

    def __init__(self) -> None:
        self.cuda = _CudaOnCpu()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **options)


class _CudaOnCpu:
    """`torch.cuda` as that module sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def current_stream() -> _NoStream:
        return _NoStream()


def _splits_as_numpy(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """The all-to-all takes its split sizes as host arrays; they are ready as soon as they are computed."""
    if point == dispatcher.cuda_dtoh_point and not dispatcher.drop_and_pad:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(dispatcher, name)
            if torch.is_tensor(value):
                setattr(dispatcher, name, value.numpy())
    return tokens_per_expert


_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher."
_RANDOM = "megatron.core.tensor_parallel.random:"

SYMBOLS = (
    Symbol(
        "torch.cuda.current_device",
        "parameters and buffers are created on 'the current device'",
        path="torch:cuda.current_device",
        make=lambda: lambda: torch.device("cpu"),
    ),
    Symbol(
        "torch.cuda.synchronize",
        "pipeline stages wait for the device after exchanging shapes",
        path="torch:cuda.synchronize",
        make=lambda: lambda device=None: None,
    ),
    Symbol(
        "schedules.torch",
        "pipeline schedules create a token counter on device 'cuda'",
        path="megatron.core.pipeline_parallel.schedules:torch",
        make=_TorchOnCpu,
    ),
    Symbol(
        "param_and_grad_buffer.torch",
        "gradient buffers look for graph replays on the current stream",
        versions=("0.19.2",),
        path="megatron.core.distributed.param_and_grad_buffer:torch",
        make=_TorchOnCpu,
    ),
    Symbol(
        "random._get_cuda_rng_state",
        "recompute keeps the CUDA generator's state beside the CPU's",
        path=_RANDOM + "_get_cuda_rng_state",
        make=lambda: lambda *_, **__: None,
    ),
    Symbol(
        "random._set_cuda_rng_state",
        "recompute restores it",
        path=_RANDOM + "_set_cuda_rng_state",
        make=lambda: lambda *_, **__: None,
    ),
    Symbol(
        "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
        "a CUDA stream is created when the first dispatcher is built",
        path=_DISPATCHER + "cuda_dtoh_stream",
        make=_NoStream,
    ),
    Symbol(
        "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
        "split sizes are fetched over a CUDA stream; on a CPU they only change their type",
        path=_DISPATCHER + "_maybe_dtoh_and_synchronize",
        make=lambda: _splits_as_numpy,
    ),
)
DURING_IMPORT = Symbol(
    "torch.compile (while megatron-core is imported)",
    "its fusions would load the compiler (2 s) and compile on first use",
    path="torch:compile",
    make=lambda: lambda function=None, **_: function if function is not None else lambda inner: inner,
)
DURING_BUILD = Symbol(
    "torch.Tensor.cuda (while a model is built)",
    "a tied embedding is moved to 'cuda' before its stages agree on it",
    path="torch:Tensor.cuda",
    make=lambda: lambda tensor, *_, **__: tensor,
)

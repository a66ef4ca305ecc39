"""The gate in front of fake quantisation: off, it imports neither `qat`, nor a kernel, nor torch, nor Triton.

    hook = FakeQATHook(recipe.quant)
    backend = MegatronBackend(..., install=hook)      # called with each model chunk
    backend.step(batch); hook.after_step(micro_batches)

The training backend stays free of quantisation: it calls what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.quant.config import QuantConfig
from miles.quant.scope import Ignore

if TYPE_CHECKING:
    from torch import nn


class FakeQATHook:
    """Installs fake quantisation on every model chunk it is called with, if recipe or environment ask for it.

    `group`: called once per chunk, returns the expert-tensor-parallel process group (None: experts are not sharded).
    `allow_empty`: a chunk without routed experts is no error (pipeline stages of dense layers).
    `model_dir`: a checkpoint there that has a quantisation contract must have been made with the same rounding.
    """

    def __init__(
        self,
        config: QuantConfig,
        *,
        environ: Mapping[str, str] | None = None,
        group: Callable[[], Any] | None = None,
        allow_empty: bool = False,
        model_dir: Path | None = None,
    ) -> None:
        self.config = config
        self.rounding = config.fake_qat_config(environ)
        self.chunks: list[nn.Module] = []
        self._group = group
        self._allow_empty = allow_empty
        if self.rounding is not None and model_dir is not None:
            from miles.quant.contract import check_rounding

            check_rounding(model_dir, self.rounding, where="start of fake quantisation")

    @property
    def enabled(self) -> bool:
        return self.rounding is not None

    def __call__(self, chunk: nn.Module) -> None:
        if self.rounding is None:
            return
        from miles.quant import qat

        qat.install(
            chunk,
            self.rounding,
            ignore=Ignore(self.config.ignore),
            group=self._group() if self._group else None,
            allow_empty=self._allow_empty,
        )
        self.chunks.append(chunk)

    def after_step(self, micro_batches: int) -> None:
        """Raises `QATHookMissing` when a routed expert was used without its hook in the step."""
        if self.rounding is None:
            return
        from miles.quant import qat
        from miles.quant.errors import QATHookMissing

        if not self.chunks:
            raise QATHookMissing("fake quantisation is on but the backend never called its install hook")
        for chunk in self.chunks:
            qat.assert_called(chunk, micro_batches)

"""The gate in front of fake quantisation: off, it imports neither `qat`, nor a kernel, nor torch, nor Triton.

    hook = FakeQATHook(recipe.quant, model_dir=...)
    backend = MegatronBackend(..., install=hook)      # called with each model chunk
    backend.step(batch); hook.after_step(micro_batches)

The training backend stays free of quantisation: it calls what it was given, and keeps the contract that `contract`
returns in its checkpoints and beside its exports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.quant.config import QuantConfig
from miles.quant.scope import Scope

if TYPE_CHECKING:
    from torch import nn

    from miles.quant.contract import QuantContract


class FakeQATHook:
    """Installs fake quantisation on every model chunk it is called with, if recipe or environment ask for it.

    `group`: called once per chunk, returns the expert-tensor-parallel process group (None: experts are not sharded).
    `allow_empty`: a chunk without routed experts is no error (pipeline stages of dense layers).
    `model_dir`: the Hugging Face folder that training starts from; if it has a quantisation contract, that must agree.
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
        self.scope = Scope()
        self.chunks: list[nn.Module] = []
        self._group = group
        self._allow_empty = allow_empty
        if self.rounding is not None or model_dir is not None:
            self._check_model(model_dir)

    def _check_model(self, model_dir: Path | None) -> None:
        from miles.quant.contract import check_rounding
        from miles.quant.errors import QuantConfigError
        from miles.quant.headers import read_json, weight_names

        options = self.config.nvfp4
        if model_dir is None:
            if options is not None and (options.ignore or options.bf16_first_layers or options.bf16_last_layers):
                raise QuantConfigError(
                    "nvfp4 ignore and bf16 layers are names of a checkpoint: give FakeQATHook its model_dir"
                )
            return
        if options is not None:
            self.scope = options.scope(weight_names(model_dir), read_json(model_dir / "config.json"))
        where = "start of training" if self.rounding is None else "start of fake quantisation"
        check_rounding(model_dir, self.rounding, where=where, scope=self.scope)

    def __call__(self, chunk: nn.Module, hf_names: Callable[[str], Iterable[str]] | None = None) -> None:
        """`hf_names`: the Hugging Face names behind a parameter of the chunk, which the ignore list speaks of."""
        if self.rounding is None:
            return
        from miles.quant import qat

        qat.install(
            chunk,
            self.rounding,
            ignore=self.scope.ignore,
            hf_names=hf_names,
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

    def contract(self, hf_names: Iterable[str]) -> QuantContract | None:
        """How the experts of a model with these Hugging Face names are rounded; None when fake quantisation is off."""
        if self.rounding is None:
            return None
        from miles.quant.contract import nvfp4_contract
        from miles.quant.convert.planning import producer

        return nvfp4_contract(
            self.rounding,
            self.scope.select(hf_names),
            source_digest="training",
            producer=producer("fake quantisation"),
            ignore=self.scope.ignore.compact(),
            weights="masters",
        )

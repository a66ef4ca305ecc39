"""The gate in front of fake quantisation: off, it imports neither `qat`, nor a kernel, nor torch, nor Triton.

The training backend calls `maybe_install` after it has built (and wrapped) its model chunks and `after_step` after
every step; both do nothing when the gate is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles.quant.config import QuantConfig
from miles.quant.scope import Ignore

if TYPE_CHECKING:
    from torch import nn


def maybe_install(
    chunks: Sequence[nn.Module],
    config: QuantConfig,
    *,
    group: Any = None,
    environ: Mapping[str, str] | None = None,
) -> bool:
    """Install fake quantisation on the model chunks of this rank if recipe or environment ask for it.

    `group`: the expert-tensor-parallel process group, or None. Returns whether it is on.
    """
    rounding = config.fake_qat_config(environ)
    if rounding is None:
        return False
    from miles.quant import qat

    for chunk in chunks:
        qat.install(chunk, rounding, ignore=Ignore(config.ignore), group=group, allow_empty=len(chunks) > 1)
    return True


def after_step(chunks: Sequence[nn.Module], micro_batches: int, *, installed: bool) -> None:
    """Raises `QATHookMissing` when a routed expert was used without its hook in the step."""
    if not installed:
        return
    from miles.quant import qat

    for chunk in chunks:
        qat.assert_called(chunk, micro_batches)

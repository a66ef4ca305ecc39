"""The NVFP4 quantise-dequantise configuration: which association of operations a weight is rounded with.

No torch, no Triton: the gate that decides whether fake quantisation runs at all reads this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class ErrorMode(StrEnum):
    """How the 16 differences of a block are summed when 4over6 chooses between its two scales."""

    MAE = "MAE"
    MSE = "MSE"


@dataclass(frozen=True)
class NVFP4QDQConfig:
    """One NVFP4 rounding. Immutable and hashable, so that it can key a compiled kernel.

    - `use_4over6`: per block, choose between mapping the maximum to 6 or to 4 by the smaller error.
    - `e4m3_max`: largest block scale used for the tensor scale, 448, or 256 (4over6 only).
    - `error_mode`: MAE or MSE, 4over6 only.
    - `error_use_fast_math`: Transformer Engine's name; it selects the fp16 error domain, 4over6 only.
    - `decode`: `te` = q * ((scale8 * A) * (1 / (6 * E))), `stored` = q * (scale8 * S_dec); the last fp32 bit may differ.

    >>> NVFP4QDQConfig().encode_numerator
    2688.0
    """

    use_4over6: bool = False
    e4m3_max: int = 448
    error_mode: ErrorMode = ErrorMode.MAE
    error_use_fast_math: bool = False
    decode: Literal["te", "stored"] = "te"

    def __post_init__(self) -> None:
        if not isinstance(self.error_mode, ErrorMode):
            raise ValueError(f"error_mode must be an ErrorMode, got {self.error_mode!r}")
        if self.e4m3_max not in (256, 448):
            raise ValueError(f"e4m3_max must be 256 or 448, got {self.e4m3_max}")
        if self.e4m3_max == 256 and not self.use_4over6:
            raise ValueError("e4m3_max=256 needs use_4over6=True: the standard rounding is defined for 448 only")
        if self.error_use_fast_math and not self.use_4over6:
            raise ValueError("error_use_fast_math needs use_4over6=True: only the 4over6 choice has an error domain")
        if self.decode not in ("te", "stored"):
            raise ValueError(f"decode must be 'te' or 'stored', got {self.decode!r}")

    @property
    def encode_numerator(self) -> float:
        """6 * e4m3_max, the value that the tensor maximum is mapped to."""
        return 6.0 * self.e4m3_max

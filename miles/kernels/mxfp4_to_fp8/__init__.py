"""MXFP4 weights to FP8 with 128x128 power-of-two scales: `reference` (plain torch), `kernel` (Triton), `api`.

Integer arithmetic only; the result says per tile whether anything was rounded.
"""

__all__ = ["api", "reference"]

"""NVFP4 quantise-dequantise of weights: `config` (no torch), `reference` (plain torch), `kernel` (Triton), `api`.

Nothing is imported here, so that reading the configuration loads neither torch nor Triton.
"""

__all__ = ["api", "config", "reference"]

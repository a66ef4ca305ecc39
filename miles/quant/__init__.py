"""Low precision: reference codecs, the scope of quantisation, fake QAT, contracts in checkpoints, converters.

Number formats and Triton kernels are in `miles.kernels`; nothing is imported here, so that a run without
quantisation loads none of it.
"""

__all__ = [
    "cli",
    "codecs",
    "config",
    "contract",
    "errors",
    "export",
    "headers",
    "hook",
    "nvfp4_config",
    "packed",
    "scope",
]

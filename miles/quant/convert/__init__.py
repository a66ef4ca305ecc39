"""Checkpoint converters: one function per conversion, each plan -> `run.execute`. See docs/guide/low-precision.md."""

__all__ = ["bf16_to_fp8", "fp8_to_mxfp8", "journal", "mxfp4_to_fp8", "planning", "shards", "to_nvfp4"]

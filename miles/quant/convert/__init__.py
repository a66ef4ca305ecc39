"""Checkpoint converters: one function per conversion, each plan -> `run.execute`. See docs/guide/low-precision.md."""

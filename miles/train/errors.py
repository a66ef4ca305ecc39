"""Errors of the training backends and their checkpoints."""

from __future__ import annotations

from miles.config import ConfigError, MilesError


class TrainError(MilesError):
    """Training cannot go on: a rank failed, a gradient is not finite, an input does not fit the model."""


class PlatformError(MilesError):
    """This machine or this megatron-core version is not one that the backend was verified on."""


class ParallelismError(ConfigError):
    """The parallel layout is impossible for this model or this number of processes."""


class CheckpointError(ConfigError):
    """A checkpoint is missing, incomplete, damaged or of another model; the text says which and what to do."""

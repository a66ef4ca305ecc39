"""Errors of model folders, families and weight maps."""

from __future__ import annotations

from miles.config import ConfigError


class ModelError(ConfigError):
    """A model folder or a family description is wrong; the text names file, key, expected and got."""


class UnsupportedModelError(ModelError):
    """The checkpoint describes something that this family or this build cannot train."""


class WeightMapError(ModelError):
    """Names or shapes of a checkpoint do not agree with the family's weight map."""

"""Errors of a run as a whole."""

from __future__ import annotations

from miles.config.errors import ConfigError, MilesError


class RunFolderError(ConfigError):
    """The run folder cannot be used: in use, unwritable, or of another recipe."""


class PlacementError(ConfigError):
    """The recipe's processes do not fit the cluster, or a node of it cannot run them."""


class ClusterError(ConfigError):
    """The Ray cluster that was named cannot be used."""


class RunError(MilesError):
    """A part of the run failed; what was finished is kept and the same command resumes."""


class NodeLost(RunError):
    """A node with ranks or engines of this run is gone."""


class ExpectationMissed(MilesError):
    """The run finished but a metric that the recipe expects is out of bounds."""

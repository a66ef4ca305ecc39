"""Base of every typed configuration: strict models, YAML with positions, overrides, environment, errors.

Imports nothing of ours; everything else may import it.
"""

from miles.config.errors import ConfigError, MilesError
from miles.config.model import StrictModel

__all__ = [
    "ConfigError",
    "MilesError",
    "StrictModel",
    "beside_recipe",
    "callable_room",
    "environment",
    "errors",
    "files",
    "json_text",
    "metric_names",
    "metric_table",
    "names",
    "overrides",
    "user_code",
    "validation",
    "yaml_source",
]

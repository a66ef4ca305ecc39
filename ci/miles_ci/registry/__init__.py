"""`registry.yaml` as a typed, checked model. Importing this package imports pydantic."""

from miles_ci.registry.load import load_fleet
from miles_ci.registry.model import Fleet

__all__ = ["Fleet", "dates", "hosted", "identify", "load", "load_fleet", "model", "schema"]

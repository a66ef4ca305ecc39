"""The fleet: `registry.yaml` as a typed, checked model. Importing this package imports pydantic."""

from miles_ci.registry.load import load_fleet
from miles_ci.registry.model import CPU_WORKERS, Cadence, Fleet, Hardware, Pool, Suite
from miles_ci.registry.schema import fleet_json_schema

__all__ = ["CPU_WORKERS", "Cadence", "Fleet", "Hardware", "Pool", "Suite", "fleet_json_schema", "load_fleet"]

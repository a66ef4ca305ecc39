"""The JSON Schema of `registry.yaml`, generated from the model so that the two cannot differ."""

from __future__ import annotations

import json
from typing import Any

from ci.fleet.model import Fleet

SCHEMA_PATH = "docs/reference/registry.schema.json"


def fleet_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a registry file: structure and ranges, not the rules across entries."""
    schema = Fleet.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "registry.yaml"
    return schema


def schema_text() -> str:
    """The committed form of the schema."""
    return json.dumps(fleet_json_schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

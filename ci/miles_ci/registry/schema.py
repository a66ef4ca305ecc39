"""The JSON Schema of `registry.yaml`, generated from the model so that the two cannot differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from miles_ci.registry.model import Fleet

SCHEMA_PATH = "docs/reference/registry.schema.json"


def fleet_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a registry file: structure and ranges, not the rules across entries."""
    schema = Fleet.model_json_schema()
    _close(schema)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "registry.yaml"
    return schema


def _close(node: Any) -> None:
    """Names are patterns: without this a name that breaks its pattern would count as an additional one."""
    if isinstance(node, dict):
        if "patternProperties" in node:
            node.setdefault("additionalProperties", False)
        for value in node.values():
            _close(value)
    elif isinstance(node, list):
        for value in node:
            _close(value)


@lru_cache(maxsize=1)
def _validator() -> Any:
    import jsonschema

    # JSON Schema lets 1.0 pass for an integer; the model, like everyone who reads the file, does not.
    checker = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    )
    kind = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=checker)
    return kind(fleet_json_schema())


def schema_text() -> str:
    """The committed form of the schema."""
    return json.dumps(fleet_json_schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def schema_findings(data: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Violations of the schema as (path of keys, message). Needs jsonschema (a development dependency)."""
    for error in _validator().iter_errors(data):
        yield tuple(error.absolute_path), error.message[:300]

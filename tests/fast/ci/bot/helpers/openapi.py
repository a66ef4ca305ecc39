"""GitHub's own API description, cut to the endpoints we use: validate requests and replies, build valid samples.

Regenerate with the test `test_the_vendored_description_is_githubs_own` failing text, or:
    cd ci/miles_ci/workflows/node && node openapi.mjs "METHOD /path" ... (paths in endpoints.txt)
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

HERE = Path(__file__).parent
ENDPOINTS = (HERE / "endpoints.txt").read_text().split("\n")


@cache
def description() -> dict[str, Any]:
    return json.loads((HERE / "github_openapi.json").read_text())


@cache
def _routes() -> list[tuple[str, re.Pattern[str], str]]:
    routes = []
    for name in description()["operations"]:
        method, path = name.split(" ", 1)
        routes.append((method, re.compile(re.sub(r"\\\{[a-z_]+\\\}", "([^/]+)", re.escape(path))), name))
    return routes


def operation(method: str, path: str) -> str | None:
    """The described operation behind a request; more literal paths first."""
    fits = [name for verb, pattern, name in _routes() if verb == method and pattern.fullmatch(path)]
    return min(fits, key=lambda name: name.count("{"), default=None)


@cache
def _validator(key: str) -> jsonschema.Draft202012Validator:
    schema = json.loads(key) | {"$defs": description()["$defs"]}
    return jsonschema.Draft202012Validator(schema)


def problems(schema: dict[str, Any] | None, value: Any) -> list[str]:
    if schema is None:
        return [] if value in (None, {}, []) else [f"a body where none is described: {str(value)[:80]}"]
    found = _validator(json.dumps(schema, sort_keys=True)).iter_errors(value)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found]


def check_request(method: str, path: str, query: dict[str, Any], body: Any) -> list[str]:
    name = operation(method, path)
    if name is None:
        return [f"{method} {path} is not described"]
    entry = description()["operations"][name]
    unknown = sorted(set(query) - set(entry["query"]) - {"page", "per_page"})
    out = [f"{name}: unknown query parameter {item}" for item in unknown]
    if entry["request"] is None and body:
        out.append(f"{name}: takes no body")
    if entry["request"] is not None and (body is not None or "required" in entry["request"]):
        out += [f"{name}: request {text}" for text in problems(entry["request"], body)]
    return out


def check_reply(method: str, path: str, status: int, body: Any) -> list[str]:
    name = operation(method, path)
    if name is None:
        return [f"{method} {path} is not described"]
    responses = description()["operations"][name]["responses"]
    if str(status) not in responses:
        # Rate limits and server errors are described for the API as a whole.
        return (
            []
            if status in (401, 403, 404, 410, 422, 429) or status >= 500
            else [f"{name}: status {status} is not described"]
        )
    return [f"{name} {status}: reply {text}" for text in problems(responses[str(status)], body)]


def sample(schema: dict[str, Any], depth: int = 0) -> Any:
    """The smallest value that fits a schema: required fields only, deterministic."""
    if "$ref" in schema:
        return sample(description()["$defs"][schema["$ref"].rsplit("/", 1)[-1]], depth + 1)
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    for word in ("oneOf", "anyOf"):
        if word in schema:
            return sample(schema[word][0], depth + 1) if "properties" not in schema else _object(schema, depth)
    if "allOf" in schema:
        merged: dict[str, Any] = {}
        for part in schema["allOf"]:
            value = sample(part, depth + 1)
            merged |= value if isinstance(value, dict) else {}
        return merged
    kinds = schema.get("type", "object" if "properties" in schema else "string")
    kind = kinds if isinstance(kinds, str) else ("null" if "null" in kinds else kinds[0])
    if kind == "object":
        return _object(schema, depth)
    if kind == "array":
        return []
    simple = {"integer": schema.get("minimum", 1), "number": 1, "boolean": False, "null": None}
    if kind in simple:
        return simple[kind]
    return {"date-time": "2026-11-30T12:00:00Z", "uri": "https://example.invalid/x", "email": "a@example.invalid"}.get(
        schema.get("format", ""), "x"
    )


def _object(schema: dict[str, Any], depth: int) -> dict[str, Any]:
    assert depth < 40, "the sample recurses"
    properties = schema.get("properties", {})
    return {name: sample(properties.get(name, {}), depth + 1) for name in schema.get("required", [])}


def reply_sample(name: str, status: int) -> Any:
    """A valid reply of an operation, to be overlaid with the values of a test."""
    schema = description()["operations"][name]["responses"][str(status)]
    return None if schema is None else sample(schema)


def named_sample(name: str) -> Any:
    """A sample of a named schema; one that may be null is given as an object."""
    schema = description()["$defs"][name]
    if isinstance(schema.get("type"), list):
        schema = {**schema, "type": schema["type"][0]}
    return sample(schema)


def overlay(base: Any, values: Any) -> Any:
    """`values` on top of `base`, deeply for objects."""
    if isinstance(base, dict) and isinstance(values, dict):
        return {**base, **{key: overlay(base.get(key), value) for key, value in values.items()}}
    return values

"""Whether the interpreter of `engine.python` can serve: the package is there, and its build has the routes we call.

Asked in that interpreter without importing SGLang, which takes seconds: routes are read from the server's source.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from miles.config import ConfigError
from miles.rollout.config import EngineConfig
from miles.rollout.engines.sglang.arguments import server_environment, server_python

TIMEOUT_S = 60.0
# Beyond these a build may lack begin_weight_update and end_weight_update (0.5.17 does).
NEEDED_ROUTES = (
    "/generate",
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/flush_cache",
    "/update_weights_from_tensor",
    "/update_weight_version",
    "/model_info",
    "/server_info",
)
FIX = "build one with `make sglang-cpu` and name it in engine.python, or use engine.engine=embedded"

_QUESTION = """
import ast, importlib.metadata, importlib.util, json, pathlib
spec = importlib.util.find_spec("sglang")
answer = {"found": spec is not None, "version": "unknown", "routes": []}
if spec is not None:
    try:
        answer["version"] = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        pass
    for root in spec.submodule_search_locations or []:
        server = pathlib.Path(root) / "srt" / "entrypoints" / "http_server.py"
        if server.is_file():
            for node in ast.walk(ast.parse(server.read_text())):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    for mark in node.decorator_list:
                        if isinstance(mark, ast.Call) and mark.args and isinstance(mark.args[0], ast.Constant):
                            answer["routes"].append(mark.args[0].value)
print(json.dumps(answer))
"""


@dataclass(frozen=True, slots=True)
class Build:
    """An SGLang that can serve: its version and its routes."""

    version: str
    routes: frozenset[str]


def check_interpreter(config: EngineConfig) -> Build:
    """`ConfigError`, one line, for an interpreter that does not start, has no SGLang or one without a needed route."""
    python = server_python(config)
    answer = _ask(python, config)
    if not answer["found"]:
        raise ConfigError(f"engine.engine is sglang, but the package sglang is not installed in {python}; {FIX}")
    build = Build(str(answer["version"]), frozenset(r for r in answer["routes"] if isinstance(r, str)))
    lacking = [route for route in NEEDED_ROUTES if route not in build.routes]
    if lacking:
        raise ConfigError(f"engine.python {python}: sglang {build.version} has no route {', '.join(lacking)}; {FIX}")
    return build


def _ask(python: str, config: EngineConfig) -> dict[str, Any]:
    command = [python, "-c", _QUESTION]
    try:
        done = subprocess.run(
            command, env=server_environment(config), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        answer = json.loads(done.stdout)
    except OSError as error:
        raise ConfigError(f"engine.python {python}: {error.strerror or error}; {FIX}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"engine.python {python}: no answer within {TIMEOUT_S:g} s; {FIX}") from None
    except ValueError:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"engine.python {python} is no Python 3 that starts: {said[:200]}; {FIX}") from None
    if not isinstance(answer, dict) or not {"found", "version", "routes"} <= answer.keys():
        raise ConfigError(f"engine.python {python} is no Python 3 that starts: it answered {done.stdout[:80]!r}; {FIX}")
    return answer

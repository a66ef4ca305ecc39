"""GitHub's own JavaScript packages (parser, expressions, API description), run through Node.

Absent Node or packages are reported by `missing()` and never count as a pass. Install with
`npm ci --prefix "$(python -m miles_ci.workflows.node_tools)"`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NODE_DIR = Path(__file__).parent / "node"


def missing() -> str | None:
    """Why the Node tools cannot run here, or None."""
    if shutil.which("node") is None:
        return "node is not installed (version 20 or newer)"
    if not (NODE_DIR / "node_modules").is_dir():
        return f"packages are not installed: run `npm ci` in {NODE_DIR}"
    return None


def run_node(script: str, args: Sequence[str] = (), *, stdin: Any = None, timeout_s: float = 60) -> Any:
    """Run one of our scripts and read its JSON answer. Raises `RuntimeError` with Node's own message."""
    reason = missing()
    if reason:
        raise RuntimeError(reason)
    done = subprocess.run(
        ["node", "--import", "./json-hook.mjs", script, *args],
        cwd=NODE_DIR,
        input=None if stdin is None else json.dumps(stdin),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{script}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def official_parse(paths: Sequence[Path]) -> dict[str, Any]:
    """GitHub's parser on workflow files: `{path: {"errors": [...], "jobs": {...}}}`."""
    answer: dict[str, Any] = run_node("parse.mjs", [str(path.resolve()) for path in paths])
    return answer


if __name__ == "__main__":
    print(NODE_DIR)

"""What every CPU benchmark writes besides its numbers: date, hardware, command."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def head() -> dict[str, Any]:
    """Call it before measuring: the load is that of the machine, not of the benchmark."""
    cpu = platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    hardware = {"cpu": cpu, "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {**hardware, "python": platform.python_version()},
        "command": "python " + " ".join(Path(word).name if word.startswith("/") else word for word in sys.argv),
    }


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

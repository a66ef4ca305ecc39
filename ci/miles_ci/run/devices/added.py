"""Devices of a backend that registry.yaml adds: two commands of the project answer where a driver would.

`devices` prints `{"devices": [{"bus_id", "uuid", "name", "total_mib", "free_mib", "processes": [{"pid", "mib",
"command"}]}]}` for every device of the host, in a fixed order; `health` uses the visible ones and prints
`{"ok": true, "devices": N}` or `{"ok": false, "error": "..."}`. Both run in the repository, without a shell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_ci.run.devices import probe_child

if TYPE_CHECKING:
    from miles_ci.registry.model import Fleet

MAX_DEVICES = 64
# Becomes the name of a lock file.
_BUS_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,63}")


@dataclass(frozen=True)
class AddedBackend:
    """`visible`: the variable that shows a process its devices, as indices in the order of `devices`."""

    name: str
    visible: str
    devices: tuple[str, ...]
    health: tuple[str, ...]
    root: Path

    def ask_devices(self) -> dict[str, Any]:
        """`{"ok": True, "devices": [...]}` with checked entries, or why not; never raises."""
        answer = probe_child.ask_command(self.devices, cwd=self.root)
        if not answer.get("ok", True):
            return {"ok": False, "code": -5, "error": self._said("devices", answer.get("error"))}
        problem = _devices_problem(answer.get("devices"))
        if problem is not None:
            return {"ok": False, "code": -5, "error": self._said("devices", problem)}
        # Indices count in the order in which the command names them: a host sorted otherwise would mix them up.
        return {"ok": True, "devices": answer["devices"]}

    def ask_health(self, environ: Mapping[str, str], limit_s: float) -> dict[str, Any]:
        """In the form of the probe's answer."""
        answer = probe_child.ask_command(self.health, cwd=self.root, environ=environ, limit_s=limit_s)
        count = answer.get("devices")
        if answer.get("ok") is not True:
            return {"ok": False, "code": -5, "error": self._said("health", answer.get("error"))}
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_DEVICES:
            return {"ok": False, "code": -5, "error": self._said("health", f"devices: no count: {count!r:.40}")}
        return {"ok": True, "devices": [{}] * count, "peer_copies": 0, "driver_version": 0}

    def _said(self, field: str, what: object) -> str:
        return f"backends.{self.name}.{field}: {str(what or 'no error named')[:500]}"


DeviceBackend = str | AddedBackend
"""`cuda` and `rocm` by name, whose drivers the harness knows, or one that a registry adds."""


def device_backend(fleet: Fleet, name: str, root: Path) -> DeviceBackend:
    added = fleet.backends.get(name)
    if added is None:
        return name
    return AddedBackend(name, added.visible, tuple(added.devices), tuple(added.health), root)


def _devices_problem(value: object) -> str | None:
    if not isinstance(value, list) or len(value) > MAX_DEVICES:
        return f"`devices` must be a list of at most {MAX_DEVICES}"
    seen: set[str] = set()
    for index, item in enumerate(value):
        where = f"devices[{index}]"
        if not isinstance(item, dict):
            return f"{where}: must be an object"
        for name in ("bus_id", "uuid", "name"):
            if not isinstance(item.get(name), str) or not 0 < len(item[name]) <= 200:
                return f"{where}.{name}: must be a text of 1 to 200 characters"
        if not _BUS_ID.fullmatch(item["bus_id"]) or item["bus_id"] in seen:
            return f"{where}.bus_id: must be unique, of letters, digits and `: . _ -`, at most 64"
        seen.add(item["bus_id"])
        for name in ("total_mib", "free_mib"):
            if isinstance(item.get(name), bool) or not isinstance(item.get(name), int) or item[name] < 0:
                return f"{where}.{name}: must be a whole number of MiB"
        users = item.get("processes")
        if not isinstance(users, list) or not all(map(_is_user, users)):
            return f"{where}.processes: must be a list of pid, mib (or null) and command"
    return None


def _is_user(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("pid"), int):
        return False
    return isinstance(value.get("mib"), int | None) and isinstance(value.get("command"), str)

"""Folders that every node of a run must see under the same path: the run folder, the model, a teacher."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.config.files import storage_error
from miles.orchestrate.errors import PlacementError, RunError
from miles.orchestrate.placement import Placement
from miles.orchestrate.reservation import Reservation

MARKER = ".nodes"
# A network file system may show a new file late.
LOOK_S = 10.0
POLL_S = 0.2


def fingerprint(folder: Path) -> str | None:
    """Names and sizes of a model folder's files and what config.json says; None without config.json."""
    try:
        config = (folder / "config.json").read_bytes()
        files = sorted((entry.name, entry.stat().st_size) for entry in folder.iterdir() if entry.is_file())
    except OSError:
        return None
    return hashlib.sha256(repr(files).encode() + config).hexdigest()


def missing(marker: Path, token: str, models: Mapping[str, str | None], wait_s: float = LOOK_S) -> list[str]:
    """Runs on a node: the folders that are not there or hold something else."""
    deadline = time.monotonic() + wait_s
    while not _holds(marker, token) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    lost = [] if _holds(marker, token) else [str(marker.parent)]
    return lost + [path for path, wanted in models.items() if fingerprint(Path(path)) != wanted]


def _holds(marker: Path, token: str) -> bool:
    try:
        return marker.read_text() == token
    except OSError:
        return False


def check_nodes(reservation: Reservation, placement: Placement, run_folder: Path, models: Sequence[Path]) -> None:
    """`PlacementError` naming the nodes that do not see what they must, or on which Miles is not installed."""
    if not placement.leaves_the_driver:
        return
    marker, token = run_folder / MARKER, secrets.token_hex(16)
    try:
        marker.write_text(token)
    except OSError as error:
        raise storage_error(marker, error) from error
    try:
        wanted = {str(path): fingerprint(path) for path in models}
        nodes = {bundle.node: number for number, bundle in enumerate(placement.bundles)}
        looks = {
            node: reservation.task(missing, number).remote(marker, token, wanted) for node, number in nodes.items()
        }
        faults = [fault for node, look in looks.items() if (fault := _fault(placement, node, look))]
    finally:
        marker.unlink(missing_ok=True)
    if faults:
        raise PlacementError("\n".join(faults))


def _fault(placement: Placement, node: str, look: Any) -> str | None:
    import ray

    address = placement.cluster.node(node).address
    try:
        lost = ray.get(look, timeout=6 * LOOK_S)
    except ray.exceptions.GetTimeoutError:
        raise RunError(
            f"node {address}: no process answered within {6 * LOOK_S:g} s; run the same command again"
        ) from None
    except ray.exceptions.RayError as error:
        if "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
            last = str(error).strip().splitlines()[-1]
            return f"node {address}: Miles cannot be imported there ({last}); install the same version on every node"
        raise RunError(f"node {address}: {str(error).strip().splitlines()[-1]}; run the same command again") from None
    if not lost:
        return None
    return (
        f"node {address} does not see {' and '.join(lost)} as this node does; use storage that all nodes share under one "
        "path (run.directory or MILES_RUNS_DIR, model.path, algo.teacher)"
    )

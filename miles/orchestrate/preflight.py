"""What would stop a run minutes after its start and can be known before: checked in the driver, nothing started.

Left out: what only the device or the engine can say (memory, driver versions).
"""

from __future__ import annotations

import time
from pathlib import Path

from miles.models import registry
from miles.models.family import read_hf_config
from miles.models.hf_files import HFCheckpoint
from miles.recipe import Recipe
from miles.rollout.config import EngineConfig
from miles.rollout.errors import PortError
from miles.rollout.http_server import listen

# An engine of a killed run ends a moment after its driver; the same command may be started again at once.
PORT_WAIT_S = 3.0
POLL_S = 0.1


def check_inputs(recipe: Recipe) -> None:
    """Raise `ConfigError` for a model folder that is not complete or an engine port that is taken."""
    if recipe.model.path is not None:
        check_model_files(Path(recipe.model.path))
    if recipe.algo.teacher is not None:
        check_model_files(Path(recipe.algo.teacher))
    check_port(recipe.engine)


def check_model_files(folder: Path) -> None:
    """Every tensor that config.json implies is in the folder, whole and of its shape; only headers are read."""
    hf_config = read_hf_config(folder)
    family = registry.resolve(hf_config, where=str(folder / "config.json"))
    checkpoint = HFCheckpoint(folder)
    for name, shape, _ in family.shapes(hf_config):
        checkpoint.check(name, shape)


def check_port(engine: EngineConfig) -> None:
    """`PortError` when a port that the recipe names stays in use."""
    if engine.port == 0:
        return
    deadline = time.monotonic() + PORT_WAIT_S
    while True:
        try:
            listen(engine.host, engine.port, option="engine.port").close()
            return
        except PortError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)

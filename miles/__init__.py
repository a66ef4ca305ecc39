"""Miles: LLM post-training by reinforcement learning on Ray, megatron-core and an HTTP engine.

The same loop runs on a bare CPU machine (gloo) and on GPUs (NCCL).
Start with `miles train recipes/quickstart.yaml` or `miles.train("recipes/quickstart.yaml")`; the architecture is in
`docs/architecture.md`. Importing this package imports no other module: what it offers comes from `miles.api` when it is
asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles.api import (
        ConfigError,
        MilesError,
        Recipe,
        RunResult,
        Sample,
        Status,
        evaluate,
        load_recipe,
        train,
    )

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "MilesError",
    "Recipe",
    "RunResult",
    "Sample",
    "Status",
    "evaluate",
    "load_recipe",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'miles' has no attribute {name!r}")
    import importlib

    interface = importlib.import_module("miles.api")
    # `train` and `evaluate` are packages as well, and by now they stand here themselves: they can be called.
    return globals().get(name) or getattr(interface, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

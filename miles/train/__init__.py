"""Training backends, checkpoints and replay of one step. `miles.train.backend` is the seam; nothing heavy is imported here."""

from miles.config.callable_room import make_callable

__all__ = [
    "backend",
    "config",
    "convert",
    "errors",
    "flops",
    "installed",
    "megatron",
    "parallel_checks",
    "step_replay",
    "steps",
]

make_callable(__name__)

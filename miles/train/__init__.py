"""Training backends, checkpoints and replay of one step. `miles.train.backend` is the seam; nothing heavy is imported here."""

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

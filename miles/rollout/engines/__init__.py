"""Engine adapters: each starts a server that speaks the HTTP contract of `miles.rollout.engine`."""

__all__ = ["embedded", "sglang"]

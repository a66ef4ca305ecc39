"""Training with megatron-core under any mesh, on CPU (gloo) and on GPUs. Import submodules; nothing is imported here."""

__all__ = ["backend", "rng"]

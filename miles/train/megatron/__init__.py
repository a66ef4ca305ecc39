"""Training with megatron-core under any mesh, on CPU (gloo) and on GPUs. Import submodules; nothing heavy is imported here."""

from miles.train import installed

__all__ = ["backend", "rng"]

# Where megatron-core is missing, this says so in one line, whichever module was wanted.
installed.require()

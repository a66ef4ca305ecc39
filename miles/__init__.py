"""Miles: LLM post-training by reinforcement learning on Ray, megatron-core and SGLang.

The same loop runs on a bare CPU machine (embedded engine, gloo) and on a cluster (SGLang, NCCL).
Start with `miles train recipes/quickstart.yaml`; the architecture is in `docs/architecture.md`.
Importing this package imports no heavy library.
"""

__version__ = "0.1.0"

"""Pure tensor functions: advantages, losses, KL, corrections and log-probs.

They give the same numbers for every data-, context- and tensor-parallel layout, and know neither Ray nor
megatron-core. `objective.step_objective` is what a training backend calls. Nothing is imported here.
"""

__all__ = [
    "collectives",
    "config",
    "context",
    "fusable",
    "fused",
    "kl",
    "log_probs",
    "metrics",
    "objective",
    "sampling_mask",
    "step_batches",
]

"""Pure tensor functions: advantages, losses, KL, corrections and log-probs.

They give the same numbers for every data-, context- and tensor-parallel layout, and know neither Ray nor
megatron-core. `objective.step_objective` is what a training backend calls. Nothing is imported here.
"""

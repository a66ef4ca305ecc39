"""The embedded engine: plain torch, CPU or CUDA, behind the HTTP contract of `miles.rollout.engine`.

What it is: one process with continuous batching over a paged cache, seeded sampling, log-probs of drawn tokens,
versioned weights updated in place. What it leaves out: text (token ids only), several GPUs, quantised weights.
In fp32 a request's tokens and log-probs do not depend on what else is in the batch, bit for bit.
Start one with `launch`, or by hand:
`python -m miles.rollout.engines.embedded --config-json '{}' --model DIR --token-file FILE`.
"""

from miles.rollout.engines.embedded.launch import launch, start

__all__ = ["launch", "models", "start", "weight_group"]

"""Log-probs of given tokens from logits: Triton kernels, each beside its plain-torch reference.

`row_stats` reads the logits once and returns what a tensor-parallel shard knows of each row; `logits_gradient`
reads them once more and writes the gradient; `fused_policy_loss` does both in one visit of each row. Which
implementation runs is decided by the logits' device, never by a failure.
"""

from miles.kernels.log_probs.ops import fused_policy_loss, logits_gradient, row_stats, scale_
from miles.kernels.log_probs.reference import PolicyTerm

__all__ = ["PolicyTerm", "fused_policy_loss", "logits_gradient", "reference", "row_stats", "scale_"]

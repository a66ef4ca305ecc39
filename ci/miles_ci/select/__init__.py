"""Which tests run, and the reason for every one that does not.

`registrations` checks declarations against the fleet; `policy` turns cadence and labels into an admission
rule; `affected` finds what a change can reach; `selection` applies them and explains each decision.
"""

__all__ = ["affected", "diff", "globs", "policy", "registrations", "selection"]

"""`/rerun-test`: announce -> resolve -> run -> report, one comment for each request, edited in place.

The comment is written by the run alone: the gateway only dispatches. Every state but `running` is final, and the
sweeper ends what a killed run left behind.
"""

__all__ = ["announce", "report", "request", "resolve", "verdict"]

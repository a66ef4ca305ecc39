"""What earlier runs measured: durations of tests and values of bounded metrics, in SQLite or PostgreSQL.

`store.HistoryStore` is the seam, `open_store` chooses the implementation by URL, `corridor.evaluate` judges one
metric against its trusted past. Not here: who may write (the caller decides with `corridor.Writer`), estimates
(the planner), reports.
"""

__all__ = ["corridor", "errors", "flaky", "records", "store"]

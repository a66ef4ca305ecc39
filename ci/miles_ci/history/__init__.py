"""What earlier runs measured: durations of tests and values of gated metrics, in SQLite or PostgreSQL.

`store.HistoryStore` is the seam, `open_store` chooses the implementation by URL, `gate.evaluate` judges one
metric against its trusted past. Not here: who may write (the caller decides with `gate.may_write`), estimates
(the planner), reports.
"""

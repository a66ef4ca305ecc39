"""Runs a plan: device leases, health, one supervised process tree per test, outcomes, retries, results.

Stages, each its own module: `unit` (what is to run) -> `slots` + `schedule` (when and on which devices) ->
`supervise` (the process tree) -> `evidence` + `outcome` (what happened) -> `retry` (what kind of failure) ->
`results` (the record). `runner.run_plan` ties them together. Not here: choosing tests (`miles_ci.select`), sharding
(`miles_ci.plan`), reports over several shards (`miles_ci.report`).
"""

__all__ = ["console", "devices", "from_plan", "judge", "rerun", "results", "runner", "shard", "system"]

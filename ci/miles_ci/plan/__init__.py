"""Selected tests -> estimates -> shards -> a plan with a digest, and the simulation of a fleet under load.

`durations` and `estimate` say how long a test takes, `slots` how tests share the devices of one runner,
`shard` divides them, `build` composes the `Plan` (`miles_ci.plan.model`), `tune` learns, `simulate` predicts.
"""

__all__ = ["build", "durations", "estimate", "model", "simulate", "slots", "tune"]

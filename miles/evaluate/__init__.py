"""Evaluation: sets of prompts that training does not see, answered by the run's engines, and what came of it.

`config` says which sets, `prompt_sets` reads them, `evaluator` asks the engines and the reward functions, `estimators` and
`summary` make numbers of it, `best` keeps the checkpoint that did best. Left out: when a run evaluates and which
processes answer (`miles.orchestrate.evaluation`, `miles.orchestrate.eval_command`).
"""

from miles.config.callable_room import make_callable

__all__ = ["best", "config", "evaluator", "prompt_sets", "summary"]

make_callable(__name__)

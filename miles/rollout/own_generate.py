"""`rollout.generate`: the user's own function in the place of one request a sample, with its answers checked."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import numpy as np

from miles.config import ConfigError, user_code
from miles.data.sample import Sample, Status, validate_sample
from miles.rollout.config import RolloutConfig
from miles.rollout.engine import SamplingParams
from miles.rollout.errors import RolloutError
from miles.rollout.generate import GenerateContext, GenerateFn, single_turn

OPTION = "rollout.generate"
PARAMETERS = ("ctx", "sample", "sampling")


def generate_function(config: RolloutConfig) -> GenerateFn:
    """What turns a pending sample into a finished one: one request, or what `rollout.generate` names.

    `ConfigError` when the user's function cannot be imported, or is no coroutine function of (ctx, sample, sampling).
    """
    if config.generate is None:
        return single_turn
    path = config.generate
    function = user_code.load(path, option=OPTION, parameters=PARAMETERS, may_await=True)
    if not inspect.iscoroutinefunction(function):
        name = path.rpartition(":")[2]
        raise ConfigError(
            f"{OPTION}: {path} is no coroutine function; write `async def {name}({', '.join(PARAMETERS)})`"
        )
    limit = config.request_timeout_s

    async def generate(ctx: GenerateContext, sample: Sample, sampling: SamplingParams) -> Sample | list[Sample]:
        try:
            async with asyncio.timeout(limit):
                with user_code.running(path, option=OPTION, passing=(RolloutError,)):
                    made = await function(ctx, sample, sampling)
        except TimeoutError:  # of this limit: one of the user's own is a ConfigError by now
            raise RolloutError(
                f"{OPTION}: {path} did not finish sample {sample.sample_id} within {limit:g} s; mend it, or raise "
                "rollout.request_timeout_s"
            ) from None
        return [_checked(one, sample, path) for one in (made if isinstance(made, list) else [made])]

    if getattr(function, "waits_for_version", False):
        generate.waits_for_version = True  # type: ignore[attr-defined]
    return generate


def _checked(made: Any, asked: Sample, path: str) -> Sample:
    """`ConfigError` for what cannot have come from `asked` and the engine."""
    wrong = _fault(made, asked)
    if wrong is not None:
        raise ConfigError(f"{OPTION}: {path} returned for sample {asked.sample_id} {wrong}")
    return made


def _fault(made: Any, asked: Sample) -> str | None:
    if not isinstance(made, Sample):
        return f"{type(made).__name__}; return a Sample, or a list of them"
    if (made.group_id, made.rollout_id) != (asked.group_id, asked.rollout_id):
        return "a sample of another prompt or rollout; make it from the one that was given (written, told)"
    try:
        validate_sample(made)
    except ValueError as error:
        return f"a sample that does not fit together: {error}"
    if made.status == Status.PENDING:
        return "a pending sample: the last turn was told, not written; end with written(), or set its status"
    if made.response_length and (made.rollout_log_probs is None or made.version_spans is None):
        return "a response without log-probs or version spans; take them from the engine's answer (written)"
    first = made.tokens[: min(len(made.tokens), asked.prompt_length)]
    if made.segment == 0 and not np.array_equal(first, asked.tokens[: asked.prompt_length]):
        return "a sample that does not begin with its prompt; further segments count from 1"
    return None

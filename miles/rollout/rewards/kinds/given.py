"""Reward kind `callable`: a function that a Python program gives to `miles.train`, also one of a notebook's cell.

A recipe holds its name and a fingerprint, by which digests tell functions apart; the function itself lives in the
program, and is given again to resume.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from miles.config import ConfigError
from miles.data.sample import Sample
from miles.rollout.reward_worker.user_function import PARAMETERS
from miles.rollout.rewards.function import RewardContext, RewardFn, Value, WorkerCall
from miles.rollout.rewards.options import read_options

KIND = "callable"
# What a function carries with it goes to a worker process by value.
MAX_PICKLE_BYTES = 64 << 20
_PLAIN = (bool, int, float, str, bytes, type(None))
_given: dict[str, Callable[..., Any]] = {}


def give(function: Callable[..., Any]) -> dict[str, Any]:
    """Options of the kind for `function`, which this process knows by them from now on.

    `ConfigError` unless it takes (completion, answer, metadata).
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise ConfigError(f"reward: {function!r} is no function; define one of {', '.join(PARAMETERS)}")
    try:
        inspect.signature(function).bind(*PARAMETERS)
    except TypeError as error:
        raise ConfigError(f"reward: {name} does not take ({', '.join(PARAMETERS)}): {error}") from None
    options = {"name": name, "fingerprint": fingerprint(function)}
    _given[options["fingerprint"]] = function
    return options


def given_function(options: dict[str, Any]) -> RewardFn:
    """A coroutine function runs in the event loop, a plain one in worker processes."""
    values = read_options(KIND, options, name=(str, None), fingerprint=(str, None))
    function = _given.get(values["fingerprint"])
    if function is None:
        raise ConfigError(
            f"rollout.reward.kind {KIND}: this process does not have the function {values['name']}; give it to miles.train "
            "or miles.evaluate as reward=..., or put it into a file and use kind python"
        )
    if inspect.iscoroutinefunction(function):

        async def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
            return await function(completion, ctx.prompt.answer, ctx.prompt.metadata)

        return RewardFn(values["name"], awaited=score, text_answers=False)
    pickled = base64.b64encode(_pickled(function, values["name"])).decode()
    call = WorkerCall("miles.rollout.reward_worker.pickled_function:make", {"pickled": pickled})
    return RewardFn(values["name"], worker=call, text_answers=False)


def fingerprint(function: Callable[..., Any]) -> str:
    """sha256 of its source, of what it closes over, and of the functions and plain values that it takes from its module."""
    digest = hashlib.sha256()
    for part in _parts(function, set()):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _parts(function: Any, seen: set[int]) -> Iterator[bytes]:
    if id(function) in seen:
        return
    seen.add(id(function))
    if not isinstance(function, FunctionType):
        yield _pickled(function, type(function).__name__)
        return
    try:
        yield textwrap.dedent(inspect.getsource(function)).encode()
    except (OSError, TypeError):
        yield _pickled(function, function.__name__)
    taken = inspect.getclosurevars(function)
    defaults = {str(index): value for index, value in enumerate(function.__defaults__ or ())}
    values = {**taken.globals, **taken.nonlocals, **defaults, **(function.__kwdefaults__ or {})}
    for name, value in sorted(values.items()):
        yield name.encode()
        if isinstance(value, FunctionType):
            yield from _parts(value, seen)
        elif isinstance(value, _PLAIN):
            yield repr(value).encode()


def _pickled(function: Any, name: str) -> bytes:
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(function)
    except Exception as error:  # whatever the objects that it holds raise
        raise ConfigError(
            f"reward: {name} cannot be sent to a worker process ({type(error).__name__}: {error}); make what it uses "
            "inside of it"
        ) from error
    if len(pickled) > MAX_PICKLE_BYTES:
        raise ConfigError(
            f"reward: {name} carries {len(pickled) >> 20} MiB with it, at most {MAX_PICKLE_BYTES >> 20}; read large data "
            "from a file inside of it"
        )
    return pickled

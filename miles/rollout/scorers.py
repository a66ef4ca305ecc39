"""The built-in reward functions. Each is made from its options and compares a completion with the prompt's answer."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

from miles.config import ConfigError, user_code
from miles.data.sample import Sample
from miles.rollout.errors import RewardError
from miles.rollout.rewards import RewardContext, RewardFn, Value

_MEANING: dict[type | tuple[type, ...], str] = {str: "text", bool: "true or false", (int, float): "a number"}


def _options(kind: str, given: dict[str, Any], **known: tuple[type | tuple[type, ...], Any]) -> dict[str, Any]:
    """Options with defaults. `known`: name -> (type, default)."""
    unknown = given.keys() - known.keys()
    if unknown:
        raise ConfigError(
            f"rollout.reward.options: {kind} does not know {', '.join(sorted(unknown))}; "
            + (f"use {', '.join(sorted(known))}" if known else "it takes no options, remove them")
        )
    values = {}
    for name, (kinds, default) in known.items():
        value = given.get(name, default)
        if not isinstance(value, kinds):
            wanted = _MEANING[kinds]
            if name not in given:
                raise ConfigError(
                    f"rollout.reward.options.{name} is missing, and reward kind {kind} needs it; set it to {wanted}"
                )
            raise ConfigError(f"rollout.reward.options.{name}: {str(value)[:80]!r} is not {wanted}; write {wanted}")
        values[name] = value
    return values


def task(options: dict[str, Any]) -> RewardFn:
    """The scorer of the prompts' own task (copy_digits: share of right positions; reasoning_gym: its scorer)."""
    _options("task", options)

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        if ctx.task_score is None:
            raise RewardError(f"sample {sample.sample_id}: reward kind task needs a prompt source with a scorer")
        return ctx.task_score(completion, ctx.prompt)

    return RewardFn("task", score, inline=True)


def exact(options: dict[str, Any]) -> RewardFn:
    """1 when the completion is the answer. `strip` (default true) ignores white space around both."""
    strip = _options("exact", options, strip=(bool, True))["strip"]

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        a, b = (completion.strip(), ctx.prompt.answer.strip()) if strip else (completion, ctx.prompt.answer)
        return 1.0 if a == b else 0.0

    return RewardFn("exact", score, inline=True)


def positional(options: dict[str, Any]) -> RewardFn:
    """Share of positions whose character is right; surplus characters count as wrong positions."""
    _options("positional", options)

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        answer = ctx.prompt.answer
        right = sum(a == b for a, b in zip(completion, answer, strict=False))
        return right / max(len(answer), len(completion), 1)

    return RewardFn("positional", score, inline=True)


def regex(options: dict[str, Any]) -> RewardFn:
    """Group 1 (or the whole match) of `pattern`, last match, equals the answer; without `compare` a match is 1."""
    values = _options("regex", options, pattern=(str, None), compare=(bool, True))
    try:
        pattern = re.compile(values["pattern"], re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"rollout.reward.options.pattern: {values['pattern']!r} is no regular expression: {error}; escape "
            "special characters with a backslash"
        ) from None

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        matches = list(pattern.finditer(completion))
        if not matches or not values["compare"]:
            return float(bool(matches))
        found = matches[-1]
        text = found.group(1) if pattern.groups else found.group(0)
        return float((text or "").strip() == ctx.prompt.answer.strip())

    # In a thread: a pattern can take exponential time.
    return RewardFn("regex", score)


def choice_letter(options: dict[str, Any]) -> RewardFn:
    """The last stand-alone letter out of `letters` (default ABCD), in parentheses or bare, equals the answer's."""
    letters = _options("choice_letter", options, letters=(str, "ABCD"))["letters"]
    if not letters.strip():
        raise ConfigError("rollout.reward.options.letters is empty, so no answer could be right; write e.g. ABCD")
    pattern = re.compile(rf"(?<![A-Za-z])\(?([{re.escape(letters)}])\)?(?![A-Za-z])")

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        found = pattern.findall(completion)
        return float(bool(found) and found[-1] == ctx.prompt.answer.strip().strip("()"))

    return RewardFn("choice_letter", score, inline=True)


_ARTICLES = re.compile(r"\b(a|an|the)\b")


def _words(text: str) -> list[str]:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", text).split()


def f1(options: dict[str, Any]) -> RewardFn:
    """Word-overlap F1 of the SQuAD evaluation: lower case, no punctuation, no articles."""
    _options("f1", options)

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        got, wanted = _words(completion), _words(ctx.prompt.answer)
        if not got or not wanted:
            return float(got == wanted)
        common = sum((Counter(got) & Counter(wanted)).values())
        return 2.0 * common / (len(got) + len(wanted))

    return RewardFn("f1", score, inline=True)


def from_metadata(options: dict[str, Any]) -> RewardFn:
    """The number that the rollout itself left in the sample's metadata under `key` (default `reward`)."""
    key = _options("from_metadata", options, key=(str, "reward"))["key"]

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        if key not in sample.metadata:
            raise RewardError(f"sample {sample.sample_id}: metadata has no {key!r}; the generate function must set it")
        return sample.metadata[key]

    return RewardFn("from_metadata", score, inline=True)


def remote_http(options: dict[str, Any]) -> RewardFn:
    """POST {prompt, completion, answer, metadata, sample_id} to `url`; the reply is {"reward": number, parts...}."""
    url = _options("remote_http", options, url=(str, None))["url"]
    if not re.match(r"https?://[^/\s]+", url):
        raise ConfigError(f"rollout.reward.options.url: {url!r} is no address; write it as http://host:port/path")

    async def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        import aiohttp

        body = {
            "sample_id": sample.sample_id,
            "prompt": ctx.prompt.text,
            "completion": completion,
            "answer": ctx.prompt.answer,
            "metadata": ctx.prompt.metadata,
        }
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
            if reply.status != 200:
                raise RewardError(
                    f"sample {sample.sample_id}: {url} answered {reply.status}: {(await reply.text())[:200]}"
                )
            value = await reply.json()
        if not isinstance(value, dict):
            raise RewardError(f"sample {sample.sample_id}: {url} answered {value!r}, expected an object with 'reward'")
        return value

    return RewardFn("remote_http", score, is_async=True)


def python(options: dict[str, Any]) -> RewardFn:
    """`path` "package.module:function": (completion, answer, metadata) -> reward. Called in threads of the driver.

    A file of the user's own is "python:path/to/file.py:function".
    """
    path = _options("python", options, path=(str, None))["path"]
    reference = path if user_code.is_reference(path) else user_code.PREFIX + path
    function = user_code.load(
        reference, option="rollout.reward.options.path", parameters=("completion", "answer", "metadata")
    )

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        return function(completion, ctx.prompt.answer, ctx.prompt.metadata)

    return RewardFn(path, score)


def math_boxed(options: dict[str, Any]) -> RewardFn:
    """The last \\boxed{...} equals the answer, as text, number or expression (in a process that can be killed)."""
    values = _options("math_boxed", options, timeout_s=((int, float), 5.0))
    from miles.rollout.math_answers import MathChecker, last_boxed

    checker = MathChecker(timeout_s=float(values["timeout_s"]))

    def score(ctx: RewardContext, sample: Sample, completion: str) -> Value:
        found = last_boxed(completion)
        return 0.0 if found is None else float(checker.equal(found, ctx.prompt.answer))

    return RewardFn("math_boxed", score)


SCORERS: dict[str, Callable[[dict[str, Any]], RewardFn]] = {
    fn.__name__: fn
    for fn in (task, exact, positional, regex, choice_letter, f1, from_metadata, remote_http, math_boxed, python)
}

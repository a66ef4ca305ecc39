"""A tool in the middle of an answer: the policy writes a sum and `=`, a calculator tells the value, the policy repeats it.

`3+9=` is answered by `3+9=` (written), `12:` (told) and `12` (written). `calculator.yaml` names the three functions.
"""

from __future__ import annotations

import random
import re
from typing import Any

from miles.data.sample import Sample, Status
from miles.rollout.engine import SamplingParams
from miles.rollout.generate import GenerateContext
from miles.rollout.turns import told, written

CALL = re.compile(r"(\d{1,3})\+(\d{1,3})=")


class Sums:
    """`options`: `most`, the largest number. Items never end."""

    size = None
    alphabet = "0123456789+=:?"

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self.most, self.seed = options["most"], seed

    def item(self, index: int) -> dict[str, Any]:
        draw = random.Random(f"{self.seed} {index}")
        call = f"{draw.randint(0, self.most)}+{draw.randint(0, self.most)}="
        return {"prompt": call, "answer": value_of(call), "metadata": {"call": call}}

    def score(self, completion: str, answer: str, metadata: dict[str, Any]) -> dict[str, float]:
        """Half for the call, half for the answer that follows the calculator's words."""
        written_call, _, rest = completion.partition("=")
        told_value, _, said = rest.partition(":")
        call = agreement(written_call + "=", metadata["call"])
        answered = agreement(said, answer) if told_value == answer else 0.0
        return {"reward": 0.5 * call + 0.5 * answered, "call": call, "answer": answered}


def value_of(call: str) -> str:
    """What the calculator says, two digits at least; `?` to what is no sum of two short numbers."""
    match = CALL.fullmatch(call)
    if match is None:
        return "?"
    return f"{int(match[1]) + int(match[2]):02}"


def agreement(text: str, wanted: str) -> float:
    """Share of places with the right character."""
    same = sum(a == b for a, b in zip(text, wanted, strict=False))
    return same / max(len(text), len(wanted))


async def calculator(ctx: GenerateContext, sample: Sample, sampling: SamplingParams) -> Sample:
    """One call of the tool, then the answer; without a call the answer ends as it ended."""
    equals = int(ctx.tokenizer.encode("=")[0])
    sample = await written(ctx, sample, sampling, stop_token_ids=[equals])
    if sample.status != Status.COMPLETED or sample.tokens[-1] != equals:
        return sample
    call = ctx.tokenizer.decode(sample.tokens[sample.prompt_length :])
    return await written(ctx, told(sample, ctx.tokenizer.encode(f"{value_of(call)}:")), sampling)

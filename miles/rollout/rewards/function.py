"""What a reward is: a name, and one of three ways to run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles.data.prompts import Prompt
from miles.data.sample import Sample

# A number, or a mapping whose key `reward` is the total and whose other keys are parts kept beside it.
Value = float | dict[str, float]


class Decoder(Protocol):
    def decode_batch(self, rows: Sequence[Any]) -> list[str]: ...


@dataclass(frozen=True)
class RewardContext:
    """What a reward function may use beside the completion's text."""

    prompt: Prompt
    # The task's own scorer, (completion, prompt) -> reward; of `PromptSource.score`.
    task_score: Callable[[str, Prompt], float] | None = None


@dataclass(frozen=True)
class WorkerCall:
    """A function that a worker process makes for itself: `make` ("module:function") called with `arguments` (JSON).

    What it makes takes (completion, answer, metadata). `computes`: it keeps a core busy, so more processes than cores
    help nobody. `processor_time_s`: the kernel's bound of one call, behind the driver's clock.
    """

    make: str
    arguments: dict[str, Any] = field(default_factory=dict)
    computes: bool = False
    memory_gib: float | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class RewardFn:
    """A named reward: exactly one of `inline`, `awaited` and `worker`.

    `inline` is called at once and must be quick; `awaited` is a coroutine function; `worker` runs in processes.
    `quick(completion, answer)` gives a verdict that needs no worker, or None. `masks_errors`: what
    `rollout.reward.on_error: auto` means for it. `text_answers`: it compares with a prompt's answer, which must be text.
    """

    name: str
    inline: Callable[[RewardContext, Sample, str], Value] | None = None
    awaited: Callable[[RewardContext, Sample, str], Awaitable[Value]] | None = None
    worker: WorkerCall | None = None
    quick: Callable[[str, str], float | None] | None = None
    masks_errors: bool = False
    text_answers: bool = True

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.inline, self.awaited, self.worker)) != 1:
            raise ValueError(f"reward {self.name}: give exactly one of inline, awaited and worker")

"""The order of a run: versions, checkpoints, skipped steps, engines that do not follow. No Ray, no model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from miles.data.sample import Sample, Status, validate_sample
from miles.orchestrate import loop as loop_module
from miles.orchestrate.backends import open_rollout
from miles.orchestrate.device_sharing import device_sharing
from miles.orchestrate.errors import RunError
from miles.orchestrate.gradient_watch import GradientWatch
from miles.orchestrate.loop import TrainingLoop, check_engines
from miles.orchestrate.run_folder import locate
from miles.orchestrate.schedule import schedule_config
from miles.quant.errors import QuantError
from miles.recipe.schema import Recipe
from miles.rollout.async_rollout import AsyncRollout
from miles.rollout.sync_rollout import SyncRollout

Make = Callable[..., Recipe]
URL = "http://127.0.0.1:1"
METRICS = {
    "rollout/reward_mean": 0.5,
    "rollout/reward_std": 0.0,
    "rollout/zero_std_frac": 1.0,
    "rollout/truncated_frac": 0.0,
    "rollout/reward_errors": 0.0,
}


class FakeActorGroup:
    """Two ranks that record their calls. `skip`: steps that change nothing; `engine`: what the engine answers."""

    def __init__(
        self, events: list[Any], *, skip: set[int] = frozenset(), engine: str = "serving", engines: int = 1
    ) -> None:
        self.events, self.skip, self.engine = events, skip, engine
        self.dp_ranks = [0, 1]
        self.engines = [object()] * engines
        self.trained = 0

    def ask_workers(self, method: str, arguments: Any) -> Callable[[], Awaitable[list[Any]]]:
        self.events.append((method, *arguments) if method == "train" else (method, *arguments[0]))
        if method == "train":
            skipped = self.trained in self.skip
            self.trained += 1
            return self.later([{"train/step_skipped": float(skipped)}, {"train/step_skipped": 9.0}])
        return self.later([None if self.trained - 1 in self.skip else {URL: self.engine}, None])

    @staticmethod
    def later(answers: list[Any]) -> Callable[[], Awaitable[list[Any]]]:
        async def wait() -> list[Any]:
            return answers

        return wait

    async def on_all_workers(self, method: str, *arguments: Any) -> list[Any]:
        self.events.append((method, *arguments))
        return [{URL: self.engine}, None] if method == "send_weights" else ["", ""]

    async def connect(self) -> None:
        self.events.append(("connect",))


class FakeEngines:
    def __init__(self, events: list[Any]) -> None:
        self.events = events

    async def release_memory(self, tags: Sequence[str]) -> None:
        self.events.append(("release", *tags))

    async def resume_memory(self, tags: Sequence[str]) -> None:
        self.events.append(("resume", *tags))


class FakeRollout:
    def __init__(self, events: list[Any]) -> None:
        self.events = events

    async def start(self, version: int) -> None:
        self.events.append(("start", version))

    async def collect(self, step: int) -> Any:
        self.events.append(("collect", step))
        return SimpleNamespace(samples=[SimpleNamespace(response_length=4)], metrics=METRICS)

    async def prefetch(self, version: int) -> None:
        self.events.append(("prefetch", version))

    async def on_new_version(self, version: int) -> None:
        self.events.append(("on_new_version", version))

    async def on_skipped_step(self) -> None:
        self.events.append(("on_skipped_step",))

    async def hold(self) -> None:
        self.events.append(("hold",))

    async def release(self) -> None:
        self.events.append(("release",))

    def state(self) -> dict[str, Any]:
        return {"cursor": len(self.events)}


class FakeEvaluation:
    """Finds the step that it was asked after; fails at step `fails`."""

    def __init__(self, events: list[Any], *, fails: int = -1) -> None:
        self.events, self.fails = events, fails

    async def after(self, step: int, version: int, extra: dict[str, Any]) -> dict[str, float]:
        self.events.append(("evaluate", step, version, extra["step"]))
        if step == self.fails:
            raise RunError("an engine is gone")
        return {"eval/a/reward_mean": float(step)}


@pytest.fixture
def make_loop(recipe: Make, monkeypatch: pytest.MonkeyPatch):
    batch = SimpleNamespace(for_rank=lambda rank: f"batch of rank {rank}", metrics={})
    monkeypatch.setattr(loop_module, "prepare_steps", lambda *_, **__: SimpleNamespace(steps=[batch], metrics={}))

    def make(
        events: list[Any],
        *,
        version: int = 0,
        actors: dict[str, Any] | None = None,
        gates: Sequence[dict[str, Any]] = (),
        algo: dict[str, Any] | None = None,
        rows: list[Any] | None = None,
        mode: str = "disaggregated",
        every: int | None = None,
        evaluation: Any = None,
        **run: Any,
    ) -> TrainingLoop:
        made = recipe(run=run, quant={"gates": gates}, algo=algo or {}, eval={"every": every})
        group = FakeActorGroup(events, **(actors or {}))
        rows = [] if rows is None else rows
        return TrainingLoop(
            made,
            group,
            FakeRollout(events),
            locate(made, []),
            schedule_config(made, pad_id=0, flops=None),
            lambda row: (events.append(("row", row["step"], row["weight_version"])), rows.append(row)),
            lambda step, samples: events.append(("samples", step, len(samples))),
            lambda: events.append(("durable",)),
            GradientWatch(made.algo, made.run.no_gradient_warning_steps, lambda text: events.append(("warn", text))),
            devices=device_sharing(mode, group, FakeEngines(events)),
            version=version,
            evaluation=evaluation,
        )

    return make


def names(events: list[Any], *kinds: str) -> list[Any]:
    return [event for event in events if event[0] in kinds]


def test_each_step_trains_the_next_version_and_every_rank_gets_its_own_batch(make_loop) -> None:
    events: list[Any] = []
    asyncio.run(make_loop(events, steps=2, checkpoint_every=10).run(0))
    assert events[:8] == [
        ("start", 0),
        ("collect", 0),
        ("train", (("batch of rank 0",), None), (("batch of rank 1",), None)),
        ("send_trained", 1),
        ("prefetch", 1),
        ("on_new_version", 1),
        ("samples", 0, 1),
        ("row", 0, 1),
    ]
    assert names(events, "row") == [("row", 0, 1), ("row", 1, 2)]


def test_the_next_requests_are_sent_while_a_step_trains_except_in_the_last_one(make_loop) -> None:
    events: list[Any] = []
    asyncio.run(make_loop(events, steps=3, checkpoint_every=10).run(0))
    assert names(events, "prefetch") == [("prefetch", 1), ("prefetch", 2)]


def test_checkpoints_come_at_their_steps_and_at_the_end_with_rows_durable_before(make_loop) -> None:
    events: list[Any] = []
    asyncio.run(make_loop(events, steps=5, checkpoint_every=2).run(0))
    saves = names(events, "save", "durable")
    assert [event[0] for event in saves] == ["durable", "save"] * 3
    assert [event[2]["step"] for event in names(events, "save")] == [2, 4, 5]
    assert [event[2]["weight_version"] for event in names(events, "save")] == [2, 4, 5]
    assert {event[1].name for event in names(events, "save")} == {"checkpoints"}


def test_resumed_run_serves_its_version_before_the_first_prompt(make_loop) -> None:
    events: list[Any] = []
    asyncio.run(make_loop(events, version=3, steps=5, checkpoint_every=10).run(4))
    assert events[:3] == [("send_weights", 3), ("start", 3), ("collect", 4)]
    assert names(events, "send_trained") == [("send_trained", 4)]


def test_step_that_counts_nothing_makes_no_version(make_loop) -> None:
    events: list[Any] = []
    asyncio.run(make_loop(events, actors={"skip": {1}}, steps=3, checkpoint_every=10).run(0))
    assert names(events, "row") == [("row", 0, 1), ("row", 1, 1), ("row", 2, 2)]
    told = [("on_new_version", 1), ("on_skipped_step",), ("on_new_version", 2)]
    assert names(events, "on_skipped_step", "on_new_version") == told
    # Asked for with each step; the ranks send nothing after a skipped one.
    assert names(events, "send_trained") == [("send_trained", 1), ("send_trained", 2), ("send_trained", 2)]


def test_a_recorded_step_names_the_weights_it_begins_with(make_loop) -> None:
    events: list[Any] = []
    asyncio.run(make_loop(events, version=3, steps=6, replay_steps=[5], checkpoint_every=10).run(4))
    recordings = [call[1][1] for call in names(events, "train")]
    assert recordings[0] is None
    assert (recordings[1].folder.name, recordings[1].step, recordings[1].weight_version) == ("replay", 5, 4)


def test_gates_see_the_whole_row_of_a_step_and_none_of_a_skipped_one(make_loop) -> None:
    whole = [{"name": name, "max_abs": 1e9} for name in ("rollout/reward_mean", "time/step", "rollout/tokens_per_s")]
    events: list[Any] = []
    asyncio.run(make_loop(events, gates=whole, steps=2, checkpoint_every=10).run(0))
    assert len(names(events, "row")) == 2
    strict = [{"name": "rollout/reward_mean", "max_abs": 0.25}]
    with pytest.raises(QuantError, match=r"gate 'rollout/reward_mean': 0\.5 against a limit of 0\.25"):
        asyncio.run(make_loop([], gates=strict, steps=1, checkpoint_every=10).run(0))
    asyncio.run(make_loop([], gates=strict, actors={"skip": {0}}, steps=1, checkpoint_every=10).run(0))


def test_without_engines_versions_count_on_and_nothing_is_sent(make_loop) -> None:
    events: list[Any] = []
    asyncio.run(make_loop(events, version=2, actors={"engines": 0}, steps=4, checkpoint_every=10).run(2))
    assert names(events, "send_weights") == []
    assert names(events, "on_new_version") == [("on_new_version", 3), ("on_new_version", 4)]


@pytest.mark.parametrize("version", [0, 3])
def test_engine_that_does_not_take_a_version_ends_the_run(make_loop, version: int) -> None:
    events: list[Any] = []
    loop = make_loop(events, version=version, actors={"engine": "dirty"}, steps=5, checkpoint_every=1)
    with pytest.raises(RunError, match=rf"did not reach every engine: {URL}: dirty"):
        asyncio.run(loop.run(version))
    assert names(events, "row", "save") == []


def test_check_names_only_the_engines_that_failed() -> None:
    check_engines(1, {"a": "serving", "b": "serving"})
    with pytest.raises(RunError) as raised:
        check_engines(7, {"a": "serving", "b": "gone"})
    assert str(raised.value).startswith("weight version 7 did not reach every engine: b: gone; what was saved is kept")


def test_colocated_engines_give_their_memory_away_while_the_trainer_trains(make_loop) -> None:
    events: list[Any] = []
    asyncio.run(make_loop(events, mode="colocated", steps=2, checkpoint_every=10).run(0))
    first = events[: events.index(("row", 0, 1))]
    assert [event[:3] if event[0] != "train" else ("train",) for event in first] == [
        ("start", 0),
        ("collect", 0),
        ("release", "kv_cache", "weights"),
        ("wake",),
        ("train",),
        ("sleep",),
        ("resume", "weights"),
        ("send_weights", 1),
        ("resume", "kv_cache"),
        ("on_new_version", 1),
        ("samples", 0, 1),
    ]
    assert names(events, "prefetch") == [], "an engine without weights takes no requests"
    assert names(events, "connect") == []


def test_colocated_engines_get_their_version_again_after_a_step_that_made_none(make_loop) -> None:
    events: list[Any] = []
    loop = make_loop(events, mode="colocated", actors={"skip": {1}}, steps=3, checkpoint_every=10)
    asyncio.run(loop.run(0))
    told = names(events, "connect", "resume", "send_weights", "on_new_version", "on_skipped_step")
    assert told[3:8] == [
        ("on_new_version", 1),
        ("connect",),
        ("resume", "weights"),
        ("send_weights", 1),
        ("resume", "kv_cache"),
    ]
    assert told[8] == ("on_skipped_step",)
    assert names(events, "row") == [("row", 0, 1), ("row", 1, 1), ("row", 2, 2)]


def test_disaggregated_engines_are_left_alone(make_loop) -> None:
    events: list[Any] = []
    asyncio.run(make_loop(events, actors={"skip": {1}}, steps=3, checkpoint_every=10).run(0))
    assert names(events, "release", "resume", "wake", "sleep", "connect") == []


def test_steps_that_teach_nothing_are_counted_in_their_rows_and_told(make_loop) -> None:
    events: list[Any] = []
    rows: list[Any] = []
    asyncio.run(make_loop(events, rows=rows, steps=4, no_gradient_warning_steps=3, checkpoint_every=10).run(0))
    assert [row["train/steps_without_gradient"] for row in rows] == [1.0, 2.0, 3.0, 4.0]
    assert [text[:60] for _, text in names(events, "warn")] == [
        "3 steps in a row carried no gradient (step 2: every sample h"
    ]


def test_the_times_of_a_row_add_up_to_its_step(make_loop) -> None:
    rows: list[Any] = []
    asyncio.run(make_loop([], rows=rows, steps=1).run(0))
    parts = [rows[0][f"time/{part}"] for part in ("rollout", "score", "prepare", "train", "sync")]
    assert min(parts) >= 0
    assert sum(parts) <= rows[0]["time/step"]


class ScoringGroup:
    """Two data-parallel indices behind four ranks, in an order of their own; a score is the sample's first token."""

    dp_ranks = (1, 0, 1, 0)

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def on_workers(self, method: str, arguments: Any) -> list[Any]:
        assert method == "score"
        self.asked.append(arguments[0][1:])
        found = []
        for (batch, *_), dp_rank in zip(arguments, self.dp_ranks, strict=True):
            assert batch.dp_rank == dp_rank
            found.append([self.of(item, i) for item in batch.micro_batches for i in range(len(item.starts))])
        return found

    @staticmethod
    def of(item: Any, index: int) -> np.ndarray:
        first = item.input_ids.ravel()[item.starts[index]]
        return np.full(item.total_lengths[index] - item.prompt_lengths[index], -float(first), np.float32)


def test_every_sample_gets_its_own_scores_whoever_computed_them(recipe: Make) -> None:
    made = recipe(
        algo={"advantage": "gae", "kl": {"where": "reward", "coef": 0.1}}, train={"parallel": {"tp": 2, "dp": 2}}
    )
    nothing: Any = None
    actors: Any = ScoringGroup()
    schedule = schedule_config(made, pad_id=0, flops=None)
    loop = TrainingLoop(made, actors, nothing, nothing, schedule, nothing, nothing, nothing, nothing)
    samples = [
        Sample(f"s{i}", i, i, np.full(4 + i % 3, i + 1, dtype=np.int64), 2, reward=0.0, status=Status.COMPLETED)
        for i in range(7)
    ]
    for sample in samples:
        validate_sample(sample)
    asyncio.run(loop.score(samples))
    assert actors.asked == [("policy", "log_probs"), ("reference", "log_probs"), ("critic", "values")]
    for number, sample in enumerate(samples):
        for field in ("old_log_probs", "ref_log_probs", "values"):
            assert getattr(sample, field).tolist() == [-(number + 1.0)] * sample.response_length


@pytest.mark.parametrize(("staleness", "kind"), [(0, SyncRollout), (2, AsyncRollout)])
def test_the_recipe_says_whether_samples_may_lag(recipe: Make, staleness: int, kind: type) -> None:
    nothing: Any = None
    made = recipe(rollout={"max_staleness": staleness}, algo={"correction": {"bypass": True}} if staleness else {})
    assert type(open_rollout(made, nothing, nothing, nothing, nothing)) is kind


def test_weights_are_evaluated_before_the_step_that_starts_from_them_and_at_the_end(make_loop) -> None:
    events: list[Any] = []
    rows: list[Any] = []
    loop = make_loop(events, evaluation=FakeEvaluation(events), every=2, rows=rows, steps=3, checkpoint_every=10)
    asyncio.run(loop.run(0))
    assert names(events, "evaluate") == [("evaluate", 0, 0, 0), ("evaluate", 2, 2, 2), ("evaluate", 3, 3, 3)]
    assert [(row["step"], row["weight_version"], row.get("eval/a/reward_mean")) for row in rows] == [
        (0, 1, 0.0),
        (1, 2, None),
        (2, 3, 2.0),
        (3, 3, 3.0),
    ]
    order = [event[0] for event in events if event[0] in ("hold", "evaluate", "release", "collect", "save")]
    evaluated = ["hold", "evaluate", "release"]
    assert order == [*evaluated, "collect", "collect", *evaluated, "collect", "save", *evaluated]


def test_a_run_that_goes_on_after_its_last_step_only_evaluates(make_loop) -> None:
    events: list[Any] = []
    asyncio.run(make_loop(events, evaluation=FakeEvaluation(events), version=3, steps=3, checkpoint_every=10).run(3))
    assert events == [
        ("send_weights", 3),
        ("start", 3),
        ("hold",),
        ("evaluate", 3, 3, 3),
        ("release",),
        ("row", 3, 3),
    ]


def test_requests_go_on_after_an_evaluation_that_failed(make_loop) -> None:
    events: list[Any] = []
    loop = make_loop(events, evaluation=FakeEvaluation(events, fails=0), every=1, steps=1, checkpoint_every=10)
    with pytest.raises(RunError, match="an engine is gone"):
        asyncio.run(loop.run(0))
    assert events[-1] == ("release",)


def test_gates_do_not_ask_evaluations_and_a_loop_without_one_holds_nothing(make_loop) -> None:
    events: list[Any] = []
    asyncio.run(make_loop(events, every=1, steps=2, checkpoint_every=10).run(0))
    assert names(events, "hold", "evaluate", "release") == []

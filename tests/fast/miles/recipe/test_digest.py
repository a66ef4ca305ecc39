"""The digest names a resolved recipe: independent of how it was written, changed by every value in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.recipe.schema import Recipe, canonical_json, differences, digest
from miles.recipe.schema import settings as settings_of

# Sections that are unset by default get a value, so that their leaves are covered too.
BASE: dict[str, Any] = {
    "name": "base",
    "algo": {
        "opsm": {"delta": 0.1},
        "correction": {"mode": "truncate", "reject": {"level": "token"}},
        "kl": {"where": "none"},
    },
    "data": {"task": "jsonl", "jsonl": {"path": "prompts.jsonl"}},
    "rollout": {"filters": {"chain": [{"kind": "reward_range", "lo": 0.1, "hi": 0.9}]}},
    "expect": {"rollout/reward_mean": {"min": 0.5}},
}


def build(data: Any) -> Recipe:
    return Recipe.model_validate_json(json.dumps(data))


RECIPE = build(BASE)
RESOLVED = RECIPE.model_dump(mode="json")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = False
    for key, child in children:
        found = True
        yield from leaves(child, (*path, key))
    if not found:
        yield path


def with_leaf(value: Any, path: tuple[Any, ...]) -> Any:
    """`value` with another leaf at `path`, built without validation: not every combination is legal."""
    if not path:
        others = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value + 0.5, str: lambda: value + "x"}
        return others.get(type(value), lambda: "other")()
    part, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {**value, part: with_leaf(value[part], rest)}
    if isinstance(value, list | tuple):
        return type(value)(with_leaf(item, rest) if index == part else item for index, item in enumerate(value))
    return value.model_copy(update={part: with_leaf(getattr(value, part), rest)})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(
    "path",
    [path for path in leaves(RESOLVED) if path[0] not in ("cluster", "observe")],
    ids=lambda path: ".".join(map(str, path)),
)
def test_every_leaf_changes_the_digest(path: tuple[Any, ...]) -> None:
    other = with_leaf(RECIPE, path)
    assert digest(other) != digest(RECIPE)
    assert [line.split(":")[0] for line in differences(RECIPE, other)] == [_dotted(path)]


@pytest.mark.parametrize(
    "section", [{"cluster": {"address": "head:6379", "wait_s": 5}}, {"observe": {"trackers": [], "finish_s": 1}}]
)
def test_where_a_run_is_and_who_watches_it_does_not_change_the_digest(section: dict[str, Any]) -> None:
    elsewhere = build({**BASE, **section})
    assert elsewhere != RECIPE
    assert digest(elsewhere) == digest(RECIPE)
    assert differences(RECIPE, elsewhere) == []


def test_settings_are_the_leaves_of_what_determines_a_run() -> None:
    found = settings_of(RECIPE)
    assert (found["seed"], found["name"], found["run.replay_steps"]) == (0, "base", [])
    assert {key.partition(".")[0] for key in found}.isdisjoint({"cluster", "observe"})


def _dotted(path: tuple[Any, ...]) -> str:
    """`differences` shows a list as one value."""
    words = []
    for part in path:
        if isinstance(part, int):
            break
        words.append(part)
    return ".".join(words)


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_key_order_does_not_matter(random: Any) -> None:
    def shuffle(value: Any) -> Any:
        if isinstance(value, dict):
            items = list(value.items())
            random.shuffle(items)
            return {key: shuffle(child) for key, child in items}
        return [shuffle(child) for child in value] if isinstance(value, list) else value

    assert digest(build(shuffle(BASE))) == digest(RECIPE) == digest(build(shuffle(RESOLVED)))


def test_canonical_json_is_sorted_compact_and_holds_defaults() -> None:
    text = canonical_json(build({"name": "x"}))
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert '"group_size":16' in text
    assert len(digest(RECIPE)) == 64


def test_differences_name_key_old_and_new() -> None:
    left, right = build({"name": "a"}), build({"name": "a", "seed": 3, "algo": {"opsm": {"delta": 0.5}}})
    assert differences(left, left) == []
    assert differences(left, right) == [
        "algo.opsm: null -> None",
        "algo.opsm.delta: None -> 0.5",
        "seed: 0 -> 3",
    ]

"""Faults of a configuration: all at once, each with place, nearest name and what is allowed."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, field_validator, model_validator

from miles.config import ConfigError, StrictModel
from miles.config.names import edit_distance, nearest, suggestion
from miles.config.validation import field_names, validate
from miles.config.yaml_source import parse_yaml


class Circle(StrictModel):
    kind: Literal["circle"]
    radius: float = Field(gt=0)


class Square(StrictModel):
    kind: Literal["square"]
    side: float


class Inner(StrictModel):
    steps: int = Field(default=1, ge=1)
    mode: Literal["fast", "slow"] = "fast"


class Outer(StrictModel):
    name: str
    inner: Inner = Inner()
    maybe: Inner | None = None
    flag: bool = False
    rate: float = 0.5
    pair: tuple[float, float] = (0.0, 1.0)
    shapes: list[Annotated[Circle | Square, Field(discriminator="kind")]] = Field(default_factory=list)
    named: dict[str, Inner] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _short(cls, value: str) -> str:
        if len(value) > 5:
            raise ValueError("a name has at most 5 characters; shorten it")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Outer:
        if self.flag and self.rate == 0:
            raise ValueError("flag needs a rate above 0")
        return self


def fault(text: str) -> str:
    document = parse_yaml(text, name="f.yaml")
    with pytest.raises(ConfigError) as raised:
        validate(Outer, document.data, locate=document.locate)
    return str(raised.value)


CASES = {
    "name: x\ninner:\n  stepz: 2\n": "f.yaml:3:3: unknown key 'inner.stepz'; did you mean 'steps'?",
    "name: x\ninnner: {}\n": "f.yaml:2:1: unknown key 'innner'; did you mean 'inner'?",
    "name: x\nmaybe:\n  modus: fast\n": "f.yaml:3:3: unknown key 'maybe.modus'; did you mean 'mode'?",
    "name: x\ninner:\n  completely: 1\n": "f.yaml:3:3: unknown key 'inner.completely'; known: mode, steps",
    "name: x\nshapes:\n  - kind: circle\n    radius: 1\n    radios: 2\n": "did you mean 'radius'?",
    "name: x\nnamed:\n  one:\n    step: 3\n": "f.yaml:4:5: unknown key 'named.one.step'; did you mean 'steps'?",
    "inner: {}\n": "f.yaml:1:1: 'name' is required and missing",
    "name: x\ninner:\n  steps: '2'\n": "f.yaml:3:3: inner.steps: input should be a valid integer, got '2'",
    "name: x\ninner:\n  steps: 2.5\n": "inner.steps: input should be a valid integer",
    "name: x\nflag: 1\n": "f.yaml:2:1: flag: input should be a valid boolean, got 1",
    "name: 3\n": "f.yaml:1:1: name: input should be a valid string, got 3",
    "name: x\ninner:\n  steps: 0\n": "inner.steps: input should be greater than or equal to 1, got 0",
    "name: x\ninner:\n  mode: quick\n": "f.yaml:3:3: inner.mode: 'quick' is not allowed; use 'fast' or 'slow'",
    "name: too long\n": "f.yaml:1:1: name: a name has at most 5 characters; shorten it",
    "name: x\nflag: true\nrate: 0\n": "f.yaml:1:1: flag needs a rate above 0",
    "name: x\ninner: 3\n": "f.yaml:2:1: inner: ",
    "name: x\nshapes:\n  - kind: star\n": "f.yaml:3:",
}


@pytest.mark.parametrize("text", CASES, ids=[repr(text[:30]) for text in CASES])
def test_fault_names_place_and_fix(text: str) -> None:
    assert CASES[text] in fault(text)


def test_all_faults_come_at_once_in_one_error() -> None:
    lines = fault("nme: x\ninner:\n  steps: 0\n  mode: x\n").splitlines()
    assert len(lines) == 4
    assert [line.split(" ")[0] for line in lines] == ["f.yaml:1:1:", "f.yaml:3:3:", "f.yaml:4:3:", "f.yaml:1:1:"]


def test_yaml_lists_fill_tuples_and_integers_fill_floats() -> None:
    built = validate(Outer, {"name": "x", "pair": [1, 2], "rate": 1}, locate=lambda _: None)
    assert built.pair == (1.0, 2.0)
    assert isinstance(built.rate, float)


def test_instances_are_frozen_and_closed() -> None:
    built = Outer(name="x")
    with pytest.raises(ValidationError):
        built.name = "y"
    with pytest.raises(ValidationError):
        Outer(name="x", other=1)


def test_field_names_follow_optional_list_mapping_and_union() -> None:
    assert field_names(Outer, ("maybe",)) == ["steps", "mode"]
    assert field_names(Outer, ("named", "anything")) == ["steps", "mode"]
    assert field_names(Outer, ("shapes", 0, "square")) == ["kind", "side"]
    assert field_names(Outer, ("rate",)) == []
    assert field_names(Outer, ("absent", "deeper")) == []


def test_nearest_name_is_given_only_when_it_is_near() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert nearest("grop_size", ["group_size", "batch_groups"]) == "group_size"
    assert nearest("zzzzzz", ["group_size"]) is None
    assert nearest("lr", ["tp"]) is None
    assert suggestion("x", [f"name{i}" for i in range(20)]) == "20 names are known"
    assert suggestion("x", []) == "nothing is accepted here"

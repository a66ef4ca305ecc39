"""`observe` of a recipe: what is refused, and how to install what is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from miles.observe.config import MlflowConfig, ObserveConfig, SamplesConfig, WandbConfig, missing


def test_tensorboard_alone_by_default_and_every_tracker_is_installed_here() -> None:
    assert ObserveConfig().trackers == ("tensorboard",)
    assert missing(ObserveConfig(trackers=("tensorboard", "wandb", "mlflow"))) == {}


@pytest.mark.parametrize(
    ("tracker", "module", "said"),
    [
        ("wandb", "wandb", "wandb not installed; pip install 'miles-rl[wandb]'"),
        ("mlflow", "alembic", "alembic not installed; pip install 'miles-rl[mlflow]'"),
        ("tensorboard", "tensorboard", "tensorboard not installed; pip install tensorboard"),
    ],
)
def test_what_is_missing_is_named_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, tracker: Any, module: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert missing(ObserveConfig(trackers=(tracker,))) == {tracker: said}
    assert missing(ObserveConfig(trackers=())) == {}


def test_a_folder_that_has_the_name_of_a_package_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert list(missing(ObserveConfig(trackers=("wandb",)))) == ["wandb"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ObserveConfig(trackers=("wandb", "wandb")), "names wandb twice"),
        (lambda: ObserveConfig(trackers=("comet",)), "'tensorboard', 'wandb' or 'mlflow'"),
        (lambda: SamplesConfig(groups=-1), "use 0 or more groups of a step, or all"),
        (lambda: SamplesConfig(groups="some"), "all"),
        (lambda: WandbConfig(project="../x"), "project"),
        (lambda: WandbConfig(mode="disabled"), "'online' or 'offline'"),
        (lambda: WandbConfig(api_key="k"), "api_key"),
        (lambda: MlflowConfig(uri="runs/mlruns"), "MLflow no longer keeps runs in folders"),
        (lambda: MlflowConfig(uri="file:///tmp/x"), "has the scheme 'file'"),
        (lambda: MlflowConfig(uri="https://u:SECRET@host"), "set MLFLOW_TRACKING_USERNAME"),
        (lambda: MlflowConfig(uri="https://host?key=SECRET"), "has a query"),
        (lambda: MlflowConfig(uri="https://[host"), "cannot be read as an address"),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValidationError) as error:
        make()
    assert said in str(error.value)


def test_the_reason_does_not_repeat_the_password() -> None:
    with pytest.raises(ValidationError) as error:
        MlflowConfig(uri="https://u:SECRET@host")
    assert "SECRET" not in error.value.errors()[0]["msg"]


def test_addresses_that_mlflow_takes() -> None:
    for uri in ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db?timeout=5", "https://host:5000/mlflow", "http://[::1]:5"):
        assert MlflowConfig(uri=uri).uri == uri


def test_the_mode_of_wandb_is_the_recipe_s_then_the_variable_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert WandbConfig().chosen_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert WandbConfig().chosen_mode() == "offline"
    assert WandbConfig(mode="online").chosen_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert "WANDB_MODE is 'disabled'; use online or offline" in missing(ObserveConfig(trackers=("wandb",)))["wandb"]
    assert missing(ObserveConfig()) == {}

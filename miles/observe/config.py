"""What a run shows: text samples, and the trackers that get its numbers. Nothing here changes what is learnt."""

from __future__ import annotations

import importlib.util
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from miles.config import ConfigError, StrictModel, environment

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
# Tracker -> modules that it imports, and the extra of this project that brings them.
_MODULES = {
    "tensorboard": (("tensorboard",), None),
    "wandb": (("wandb",), "wandb"),
    "mlflow": (("mlflow", "sqlalchemy", "alembic"), "mlflow"),
}
# Names as W&B and MLflow take them; no path, no address.
NAME = r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,126}$"


class SamplesConfig(StrictModel):
    """`samples.jsonl`: `groups` of each step, as text. 0 writes none."""

    groups: int | Literal["all"] = 2
    # Of a prompt or a response; what is longer keeps its beginning and its end.
    max_chars: int = Field(default=16384, ge=100)
    # Of both files together; the older half goes when it is reached.
    max_mib: float = Field(default=64.0, ge=0.01)

    @field_validator("groups")
    @classmethod
    def _not_negative(cls, groups: int | str) -> int | str:
        if isinstance(groups, int) and groups < 0:
            raise ValueError(f"observe.samples.groups is {groups}; use 0 or more groups of a step, or all")
        return groups


class WandbConfig(StrictModel):
    """Weights & Biases. The key comes from WANDB_API_KEY or `wandb login`, never from a recipe."""

    project: str = Field(default="miles", pattern=NAME)
    entity: str | None = Field(default=None, pattern=NAME)
    # offline: written below the run folder, sent later by `wandb sync`; None: WANDB_MODE, else online.
    mode: Literal["online", "offline"] | None = None

    def chosen_mode(self) -> Literal["online", "offline"]:
        """`online` or `offline`; `ConfigError` for another word in WANDB_MODE."""
        word = self.mode or environment.read("WANDB_MODE") or "online"
        if word == "online":
            return "online"
        if word == "offline":
            return "offline"
        raise ConfigError(f"WANDB_MODE is {word!r:.40}; use online or offline, or take wandb out of observe.trackers")


class MlflowConfig(StrictModel):
    """MLflow. User, password and token come from its own variables (MLFLOW_TRACKING_TOKEN, ...), never from a recipe."""

    # None: MLFLOW_TRACKING_URI, else `mlflow.db` (SQLite) in the run folder.
    uri: str | None = None
    experiment: str = Field(default="miles", pattern=NAME)

    @field_validator("uri")
    @classmethod
    def _usable(cls, uri: str | None) -> str | None:
        if uri is not None and (fault := uri_fault(uri)) is not None:
            raise ValueError(f"observe.mlflow.uri {fault}")
        return uri


def uri_fault(uri: str) -> str | None:
    """Why this is no address of an MLflow store; the text does not repeat it, as it may hold a password."""
    try:
        parts = urlsplit(uri)
        with_password = bool(parts.username or parts.password)
    except ValueError:
        return "cannot be read as an address; write sqlite:////absolute/path.db or https://host"
    if with_password:
        return (
            "holds a user or a password, which would be written with the recipe; set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, instead"
        )
    if parts.query and parts.scheme != "sqlite":
        return "has a query, which may hold a key and would be written with the recipe; leave it out"
    if parts.scheme not in ("sqlite", "http", "https"):
        return (
            f"has the scheme {parts.scheme or 'of a plain path'!r}; MLflow no longer keeps runs in folders, so use "
            "sqlite:////absolute/path.db, or http(s)://host of an MLflow server"
        )
    return None


class ObserveConfig(StrictModel):
    """`trackers` get every row of `metrics.jsonl`; none can hold the run up, and one that fails is told once."""

    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    samples: SamplesConfig = SamplesConfig()
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    # How long the end of a run waits for its trackers, in seconds, before it leaves them.
    finish_s: float = Field(default=20.0, ge=0.0, le=600.0)

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, trackers: tuple[str, ...]) -> tuple[str, ...]:
        double = sorted({name for name in trackers if trackers.count(name) > 1})
        if double:
            raise ValueError(f"observe.trackers names {', '.join(double)} twice; name each tracker once")
        return trackers


def missing(config: ObserveConfig) -> dict[str, str]:
    """Tracker -> what it lacks in this environment, and what to do: an install command, another value of a variable."""
    found: dict[str, str] = {}
    for name in config.trackers:
        modules, extra = _MODULES[name]
        lacking = [module for module in modules if not _installed(module)]
        if lacking:
            how = f"pip install 'miles-rl[{extra}]'" if extra else f"pip install {' '.join(lacking)}"
            found[name] = f"{', '.join(lacking)} not installed; {how}"
    if "wandb" in config.trackers and "wandb" not in found:
        try:
            config.wandb.chosen_mode()
        except ConfigError as error:
            found["wandb"] = str(error)
    return found


def _installed(module: str) -> bool:
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    # A folder of that name in the working directory, as W&B leaves one, is a package without an origin.
    return found is not None and found.origin is not None

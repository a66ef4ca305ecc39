"""MLflow: an SQLite file or a tracking server, by its own client."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Any

from miles.config import environment
from miles.config.errors import ConfigError
from miles.observe.config import MlflowConfig, uri_fault
from miles.observe.trackers import run_id
from miles.observe.trackers.tracker import TrackedRun, numbers

# MLflow's own limits: parameters a call, characters of a value.
PARAMS_AT_ONCE = 100
PARAM_CHARS = 500
# Always in a row, so that its history says which rows are there.
EVERY_ROW = "weight_version"


class MlflowStore:
    """One run of an experiment."""

    def __init__(self, run: TrackedRun, config: MlflowConfig) -> None:
        self._run, self._config = run, config
        self._client: Any = None
        self._id = ""

    def open(self) -> int:
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        from mlflow import MlflowClient

        uri = self._uri()
        self._client = MlflowClient(tracking_uri=uri)
        where = f"{uri} {self._config.experiment}"
        found = run_id.known(self._run.folder, "mlflow", where=where)
        if found is not None:
            self._id = found
            self._client.update_run(found, status="RUNNING")
            return max((point.step for point in self._client.get_metric_history(found, EVERY_ROW)), default=-1) + 1
        self._id = self._client.create_run(self._experiment(), run_name=self._run.name).info.run_id
        run_id.keep(self._run.folder, "mlflow", self._id, where=where)
        self._log_settings()
        return 0

    def append(self, row: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, row["step"]) for name, value in numbers(row)]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, *, finished: bool) -> None:
        if self._id:
            self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")

    def _uri(self) -> str:
        given = self._config.uri
        if given is None and (set_outside := environment.read("MLFLOW_TRACKING_URI")):
            if (fault := uri_fault(set_outside)) is not None:
                raise ConfigError(f"MLFLOW_TRACKING_URI {fault}")
            given = set_outside
        return given or f"sqlite:///{os.path.abspath(self._run.folder / 'mlflow.db')}"

    def _experiment(self) -> str:
        name = self._config.experiment
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        # Another run may make it at the same time.
        with contextlib.suppress(Exception):
            return self._client.create_experiment(name)
        return self._client.get_experiment_by_name(name).experiment_id

    def _log_settings(self) -> None:
        from mlflow.entities import Param

        params = [Param(key, str(value)[:PARAM_CHARS]) for key, value in self._run.settings.items()]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + PARAMS_AT_ONCE])

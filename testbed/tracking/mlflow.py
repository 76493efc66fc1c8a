"""MLflow. MLFLOW_TRACKING_URI selects a server or local files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from testbed.tracking.following import Facts, Point

_PARAMETERS = 100
"""MLflow accepts no more per call."""
_MAX_VALUE = 500
"""Characters of a parameter's value that every backend accepts."""
_RUN = "testbed.run"
"""Tag with the run id, by which an earlier upload is found."""


class MlflowTracker:
    """Run in the experiment MLFLOW_EXPERIMENT_NAME, else in one named like the topology.

    A step is a millisecond of device time. A time stamp is the start time plus the device time.
    """

    def __init__(self, run: Path) -> None:
        self._client = MlflowClient()
        self._id = ""
        self._began = 0.0

    def begin(self, facts: Facts) -> None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or facts.study
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        for earlier in self._client.search_runs([experiment], f"tags.`{_RUN}` = '{facts.run}'"):
            self._client.delete_run(earlier.info.run_id)
        self._began = facts.began
        tags = {**facts.tags, _RUN: facts.run}
        made = self._client.create_run(experiment, int(facts.began * 1e3), tags, run_name=facts.run)
        self._id = made.info.run_id
        parameters = [Param(name, str(value)[:_MAX_VALUE]) for name, value in facts.parameters.items()]
        for first in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + _PARAMETERS])

    def log(self, points: Sequence[Point]) -> None:
        metrics = [
            Metric(name, value, int((self._began + point.at) * 1e3), int(point.at * 1e3))
            for point in points
            for name, value in point.values.items()
        ]
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[first : first + 1000])

    def end(self, outcome: str, files: Sequence[Path]) -> str:
        self._client.log_batch(self._id, tags=[RunTag("testbed.outcome", outcome)])
        for file in files:
            self._client.log_artifact(self._id, str(file))
        failed = outcome in ("failed", "crashed", "interrupted")
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
        return f"MLflow run {self._id} at {self._client.tracking_uri}"

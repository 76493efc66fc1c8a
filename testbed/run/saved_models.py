"""Evaluation of the models that a run saved, after the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from agents.aggregator.evaluation import Evaluator
from agents.disk import files
from agents.models.flat import first_model
from agents.wire import payloads
from analysis.load import with_class_names
from testbed.data import preparation
from testbed.errors import BadInputError
from testbed.plan.agent_configs import initial_model
from testbed.plan.models import run_task
from testbed.rundir.directory import RunDirectory
from testbed.topology import load

_MAX_BYTES = 2**33


def evaluate_saved_models(
    directory: RunDirectory, root: Path | None, *, classes: bool = False, devices: int | None = None
) -> pd.DataFrame:
    """Return one row per model and part of the data.

    Columns: `model` (the file's name), `version`, `part` (`test set`, `class`, `device`), `name`,
    `samples`, `loss`, `accuracy`, and `perplexity` if the task has one.

    `root`: folder of the datasets. `classes`: whether to evaluate per class, too. `devices`: number of
    samples per device if each device is evaluated, too. If `classes` is false, or `devices` is None, the
    setting of the run's topology applies. Raises BadInputError.
    """
    topology = load(directory.topology)
    evaluate = topology.evaluate
    changes = {"classes": classes or evaluate.classes, "devices": devices or evaluate.devices}
    topology = topology.model_copy(update={"evaluate": evaluate.model_copy(update=changes)})
    prepared = preparation.prepare(topology, root)
    task, start = run_task(topology, directory), initial_model(topology, directory)
    parts = preparation.evaluation_parts(prepared, topology)
    evaluator = Evaluator(task, prepared.test, lambda _: None, start=start, parts=parts)
    _, _, schema = first_model(task, topology.seed, start)
    rows = []
    for path in sorted(directory.models.glob("*.safetensors")):
        try:
            w, metadata, buffers = payloads.unpack(files.read(path, _MAX_BYTES))
            if metadata.get("schema") != schema:
                raise ValueError(f"its parameters do not match the present code of {topology.task.name}")
            version = int(metadata["version"])
        except (OSError, ValueError, LookupError, payloads.WireError) as error:
            raise BadInputError(
                f"{path} cannot be read as a model of {directory.path}: {error}"
            ) from error
        found = evaluator.evaluate(version, w, buffers)
        whole = ("test set", "", len(prepared.test), found.loss, found.accuracy)
        named = [(one.part, one.name, one.samples, one.loss, one.accuracy) for one in found.parts]
        rows += [(path.stem, version, *figures) for figures in (whole, *named)]
    columns = ["model", "version", "part", "name", "samples", "loss", "accuracy"]
    table = with_class_names(pd.DataFrame(rows, columns=columns), list(prepared.classes))
    if task.has_perplexity:
        with np.errstate(over="ignore"):
            table["perplexity"] = np.exp(table["loss"])
    return table

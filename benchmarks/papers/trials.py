"""Runs of the topologies in topologies/papers with some fields changed, as many at once as there are
cores. Of each remains how its model did over time; its directory is gone when it ends."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch
from rich.console import Console

from agents import events
from agents.shards import Shard
from testbed import data
from testbed.configs import RunSpec
from testbed.data import Prepared
from testbed.plan import plan, this_host
from testbed.rundir import RunDirectory
from testbed.topology import Topology, parse, yamlfile
from testbed.view import View
from testbed.virtual.run import run as simulate

TOPOLOGIES = Path(__file__).parents[2] / "topologies" / "papers"

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Judge:
    """What the global model is evaluated on: `samples` of the test set, or as many of each client's
    training data, drawn with replacement: its loss is then the federated one, every client alike."""

    on: Literal["test", "clients"] = "test"
    samples: int = 10_000


@dataclass(frozen=True, slots=True)
class Trial:
    """One run."""

    topology: str
    """Name of a file in TOPOLOGIES, without `.yaml`."""
    changes: Mapping[str, Any]
    """What is different: by field, such as `task.local.lr` or `devices.0.speed`, its new value."""
    judge: Judge = Judge()


@dataclass(frozen=True, slots=True)
class Curve:
    """How the global model did, by its evaluations, of which there is one at least."""

    at: tuple[float, ...]
    """Seconds of device time, increasing."""
    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    versions: int
    """Global models made."""

    @property
    def final_accuracy(self) -> float:
        return self._final(self.accuracy)

    @property
    def final_loss(self) -> float:
        return self._final(self.loss)

    def time_to_accuracy(self, accuracy: float) -> float:
        """Seconds until it is first reached, interpolated between evaluations; infinite for never."""
        return self._first([value - accuracy for value in self.accuracy])

    def time_to_loss(self, loss: float) -> float:
        """As `time_to_accuracy`."""
        return self._first([loss - value for value in self.loss])

    def _final(self, values: tuple[float, ...]) -> float:
        """Mean over the last fifth of the time: a single one depends on whose update came last."""
        late = [value for at, value in zip(self.at, values, strict=True) if at >= 0.8 * self.at[-1]]
        return fmean(late)

    def _first(self, excess: Sequence[float]) -> float:
        """When `excess`, one per evaluation, is first zero."""
        for k, value in enumerate(excess):
            if value < 0:
                continue
            if k == 0:
                return self.at[0]
            part = excess[k - 1] / (excess[k - 1] - value)
            return self.at[k - 1] + part * (self.at[k] - self.at[k - 1])
        return math.inf


class Bench:
    """Runs trials on all cores, and says how far it is. Leaving it ends what still goes."""

    def __init__(self, root: Path | None, console: Console) -> None:
        self._root = root
        self._console = console
        self._began = time.monotonic()
        self.runs = 0
        """Done so far, in all."""

    def __enter__(self) -> Self:
        # Read by numpy's and torch's libraries as they start: as many runs as cores leave one for each.
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        cores = len(this_host().cores)
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(cores, spawn, torch.set_num_threads, (1,))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, name: str, trials: Mapping[K, Trial]) -> dict[K, Curve]:
        """The curve of each trial; `name` is what the line of progress calls them."""
        futures = {self._pool.submit(execute, trial, self._root): key for key, trial in trials.items()}
        curves: dict[K, Curve] = {}
        with self._console.status(f"{name}: {len(futures)} runs") as status:
            for future in as_completed(futures):
                curves[futures[future]] = future.result()
                status.update(f"{name}: {len(curves)} of {len(futures)} runs, {self.elapsed}")
        self.runs += len(curves)
        return {key: curves[key] for key in trials}

    @property
    def elapsed(self) -> str:
        """Such as `3 min 10 s`."""
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        return f"{minutes} min {seconds} s"


def execute(trial: Trial, root: Path | None) -> Curve:
    """Run `trial` in this process. Raises TestbedError."""
    topology = changed(trial.topology, trial.changes)
    prepared = data.prepare(topology, root)
    samples = {client: len(chosen) for client, chosen in prepared.indices.items()}
    watcher = _Watcher()
    with tempfile.TemporaryDirectory(prefix="papers-") as folder:
        directory = RunDirectory.create(Path(folder), topology.name)
        planned = plan(topology, "virtual", this_host())
        spec = RunSpec(directory, topology, planned, samples)
        simulate(spec, judged(prepared, trial.judge), watcher)
    return watcher.curve()


def changed(name: str, changes: Mapping[str, Any]) -> Topology:
    """The topology of that name in TOPOLOGIES with `changes` made. Raises BadInputError."""
    path = TOPOLOGIES / f"{name}.yaml"
    document = json.loads(json.dumps(yamlfile.read(path).data))
    for field, value in changes.items():
        *parents, last = field.split(".")
        at = document
        for key in parents:
            at = at[int(key)] if isinstance(at, list) else at.setdefault(key, {})
        at[last] = value
    return parse(yamlfile.write(document), f"{path.name}, changed")


def judged(prepared: Prepared, judge: Judge) -> Prepared:
    """`prepared` with what `judge` wants for a test set."""
    rng = np.random.default_rng(0)  # the same in every run: they are compared
    if judge.on == "test":
        source = prepared.test
        chosen = rng.permutation(len(source))[: judge.samples]
    else:
        source = prepared.train
        parts = prepared.indices.values()
        chosen = np.concatenate([rng.choice(part, judge.samples) for part in parts])
    test = Shard(source.x[chosen], source.y[chosen], source.scale)
    return Prepared(prepared.train, test, prepared.indices)


class _Watcher(View):
    """Keeps the evaluations."""

    def __init__(self) -> None:
        self._evaluations: list[events.Evaluated] = []
        self._versions = 0

    def curve(self) -> Curve:
        points = sorted(self._evaluations, key=lambda e: e.at)
        at, loss, accuracy = zip(*((e.at, e.loss, e.accuracy) for e in points), strict=True)
        return Curve(at, loss, accuracy, self._versions)

    def record(self, record: events.Record) -> None:
        if isinstance(record, events.Evaluated):
            self._evaluations.append(record)
        elif isinstance(record, events.VersionMade):
            self._versions += 1

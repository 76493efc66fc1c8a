"""What training steps and starts cost in finished runs: virtual time predicts others with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from agents.device_actions import (
    DeviceState,
    Disconnect,
    Join,
    Reconnect,
    Restart,
    SetCpu,
    SetLink,
    from_json,
)
from analysis.load import Run
from testbed.errors import BadInputError
from testbed.plan import costs
from testbed.plan.costs import SLICED_SHARE, StepTime, timed
from testbed.topology import Virtual

_LEAST_RANGE = 0.25
"""Of `depth`, to tell what slices cost: shares of 0.1 and 0.17, or 0.5 and 0.84."""


def of_devices(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per run and device whose trainings take as long as its CPU share says, which those on GPUs
    and with `gflops` or a `timing` do not. The columns:

    `run`, `device`.
    `cpu`: share of a core.
    `depth`: how far from a whole core of the host, by the logarithm: 0 there, 1 at `SLICED_SHARE`.
    `trainings`: how many count: not those after the device's share was changed, nor those during which
    anything was done to it.
    `step`: CPU time of a step, mean, in seconds. A training takes from when its model has come, or the
    one before has ended, to its end; what an update costs beside its steps is taken off.

    Raises BadInputError where there is no such row, or a step of one run is other work than of another.
    """
    if len({repr(_work(run)) for run in runs}) > 1:
        raise BadInputError("the runs differ in their task or batch size: a step of each is other work")
    rows = [row for run in runs for row in _rows(run)]
    if not rows:
        raise BadInputError(
            f"{', '.join(run.name for run in runs)}: no updates of devices whose speed is a share of "
            "the CPU, so nothing tells what a step costs"
        )
    return pd.DataFrame(rows)


def fitted(devices: pd.DataFrame) -> StepTime:
    """The step time of all `devices` (`of_devices`): a line over their depth, by least squares; or their
    mean, at every share, where their shares are too close to each other or slices cost nothing."""
    depth, step = devices["depth"].to_numpy(np.float64), devices["step"].to_numpy(np.float64)
    if np.ptp(depth) >= _LEAST_RANGE:
        rise, whole = np.polyfit(depth, step, 1)
        if rise > 0 and whole > 0:
            return StepTime(float(whole), float(whole + rise))
    return StepTime(float(step.mean()), float(step.mean()))


def start_time(runs: Sequence[Run]) -> float | None:
    """Seconds from the order to start a client, again or as it joins, until it is ready: the mean over
    all starts in `runs` that came about before anything else was done to the device, with nothing
    holding it (so where crashes come fast, long starts are missing); None where there is none."""
    found = [seconds for run in runs for seconds in _starts(run)]
    return float(np.mean(found)) if found else None


def given(step: StepTime, start: float | None = None) -> dict[str, Any]:
    """What a topology has under `virtual` at these costs, as YAML has it. `start`: of
    a client, in seconds (None: what it is without being given)."""
    made = timed(Virtual().filled([("start_time", start)]), step)
    keys = ("step_time", "sliced_step_time", "start_time", "update_time", "packets")
    return made.model_dump(mode="json", include=set(keys))


def _work(run: Run) -> dict[str, Any]:
    """The same for runs whose step is the same work, as far as their topologies say."""
    task = dict(run.topology["task"])
    local = task.pop("local")
    task.pop("partition", None)
    return task | {"batch_size": local.get("batch_size")}


def _rows(run: Run) -> Iterator[dict[str, Any]]:
    timed = {group["name"] for group in run.topology["devices"] if group.get("timing")}
    beside = costs.of(Virtual(), None).update
    for name, updates in run.updates.groupby("client", observed=True):
        device = run.manifest["devices"][name]
        unlike = device["cpu"] is None or device["gflops"] is not None or device.get("gpu")
        if unlike or device["group"] in timed:
            continue
        lost = updates["sequence"].diff().gt(1)  # the training before may have ended after the download
        free = updates["downloaded"].combine(updates["train_end"].shift(), np.fmax)
        begun = updates["train_start"].where(lost, free)
        counts = (updates["steps"] > 0) & (updates["train_end"] > begun)
        acted = run.scenario[run.scenario["device"] == name]
        for at, details in zip(acted["at"], acted["details"], strict=True):
            action = from_json(json.loads(details))
            if isinstance(action, SetLink | Disconnect | Reconnect):
                continue  # training needs no link
            for_good = isinstance(action, SetCpu)
            counts &= (updates["train_end"] < at) | ((begun > at) & (not for_good))
        steps, count = int(updates["steps"][counts].sum()), int(counts.sum())
        if count:
            seconds = (updates["train_end"] - begun)[counts].sum() * device["cpu"] - count * beside
            share = device["cpu"] / float(run.manifest.get("dilation", 1.0))
            yield {
                "run": run.name,
                "device": name,
                "cpu": device["cpu"],
                "depth": math.log(share) / math.log(SLICED_SHARE),
                "trainings": count,
                "step": seconds / steps,
            }


def _starts(run: Run) -> Iterator[float]:
    ready = run.statuses[run.statuses["state"] == "ready"]
    for device, acted in run.scenario.groupby("device"):
        times = ready["at"][ready["client"] == device].to_numpy(np.float64)
        actions = [from_json(json.loads(text)) for text in acted["details"]]
        done = [
            (at, action)
            for at, action in zip(acted["at"], actions, strict=True)
            if action is not None and not isinstance(action, SetLink)
        ]
        ends = [*(at for at, _ in done), math.inf][1:]
        state = DeviceState()
        for (at, action), until in zip(done, ends, strict=True):
            state = state.with_action(action)
            if isinstance(action, Restart | Join) and not state.is_held:
                yield from times[(times >= at) & (times < until)][:1] - at

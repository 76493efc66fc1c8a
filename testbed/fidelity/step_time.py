"""Durations of training steps and client starts in finished runs, by which virtual time predicts
others."""

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
from testbed.plan.costs import SLICED_SHARE, StepTime, with_step_time
from testbed.topology import Virtual

_LEAST_RANGE = 0.25
"""Minimum range of `depth` to determine the cost of slices. The CPU shares 0.1 and 0.17 differ by about
this much, and so do 0.5 and 0.84."""


def of_devices(runs: Sequence[Run]) -> pd.DataFrame:
    """Return the mean CPU time of a training step, one row per run and device whose training time
    depends on its CPU share: not with a GPU, `gflops` or a `timing`. The columns are:

    `run` and `device`: names. `cpu`: share of a core. `depth`: logarithm of the share of a host core,
    scaled to 0 for a whole core and to 1 for `SLICED_SHARE`. `trainings`: number of trainings that
    count. `step`: mean CPU time of a step, in seconds.

    A training does not count if the device's CPU share changed before its end, or if an action was
    carried out on the device during it. It begins when its model arrives, or when the previous one ends,
    whichever is later. The cost of an update in addition to its steps is subtracted.

    Raises BadInputError if there is no row, or if a step is not the same work in all runs.
    """
    if len({repr(_work(run)) for run in runs}) > 1:
        raise BadInputError("the runs differ in task or batch size, so their steps are different work")
    rows = [row for run in runs for row in _rows(run)]
    if not rows:
        raise BadInputError(
            f"{', '.join(run.name for run in runs)}: no updates of devices whose speed is a share of "
            "the CPU, so the cost of a step is unknown"
        )
    return pd.DataFrame(rows)


def fit(devices: pd.DataFrame) -> StepTime:
    """Least squares in `depth`, for rows of `of_devices`. If the CPU shares are too close to each other,
    or if steps do not take longer with smaller shares, it is the mean step time of all rows."""
    depth, step = devices["depth"].to_numpy(np.float64), devices["step"].to_numpy(np.float64)
    if np.ptp(depth) >= _LEAST_RANGE:
        rise, whole = np.polyfit(depth, step, 1)
        if rise > 0 and whole > 0:
            return StepTime(_rounded(whole), _rounded(whole + rise))
    return StepTime(_rounded(step.mean()), _rounded(step.mean()))


def start_time(runs: Sequence[Run]) -> float | None:
    """Mean seconds from the order to start a client (restart or join) until it is ready; None if there
    was none.

    Starts that were disturbed by another action on the device do not count. So if crashes quickly follow
    each other, long starts are missing from the mean.
    """
    found = [seconds for run in runs for seconds in _starts(run)]
    return _rounded(float(np.mean(found))) if found else None


def _rounded(seconds: float) -> float:
    """Five significant digits: the others are noise in a topology."""
    return float(f"{seconds:.5g}")


def virtual_settings(step: StepTime, start: float | None = None) -> dict[str, Any]:
    """Plain values of a topology's key `virtual`. `start`: seconds to start a client; None for the
    default."""
    made = with_step_time(Virtual().with_defaults([("start_time", start)]), step)
    keys = ("step_time", "sliced_step_time", "start_time", "update_time", "packets")
    return made.model_dump(mode="json", include=set(keys))


def _work(run: Run) -> dict[str, Any]:
    """Settings that determine the work of a training step; only runs with equal ones can be compared."""
    task = dict(run.topology["task"])
    local = task.pop("local")
    task.pop("partition", None)
    return task | {
        "batch_size": local.get("batch_size"),
        "last_batch": local.get("last_batch", "keep"),
    }


def _rows(run: Run) -> Iterator[dict[str, Any]]:
    timed = {group["name"] for group in run.topology["devices"] if group.get("timing")}
    beside = costs.step_cost(Virtual(), None).update
    for name, updates in run.updates.groupby("client", observed=True):
        device = run.manifest["devices"][name]
        unlike = device["cpu"] is None or device["gflops"] is not None or device.get("gpu")
        if unlike or device["group"] in timed:
            continue
        lost = updates["sequence"].diff().gt(1)  # the missing training may have ended after the download
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

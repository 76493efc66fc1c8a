"""What a run came to: one line per device, and the run's headline. Pure functions of a `Run`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.load import Run

# What a device does for an update, as pairs of columns: download, training, upload.
_WORK = (("dispatched", "downloaded"), ("train_start", "train_end"), ("sent", "arrived"))


@dataclass(frozen=True, slots=True)
class Headline:
    """Accuracy and loss are on the test set, and NaN where the run was never evaluated."""

    rule: str
    versions: int
    """Global models made, the initial one not counted."""
    updates: int
    """Updates applied."""
    duration: float
    """Seconds of device time."""
    accuracy: float
    """Of the last evaluation, as is `loss`."""
    loss: float
    best_accuracy: float
    ended: str | None
    """Why the run ended; None where it has not."""


def headline(run: Run) -> Headline:
    evaluations = run.evaluations
    last = evaluations.iloc[-1] if len(evaluations) else {"accuracy": np.nan, "loss": np.nan}
    return Headline(
        rule=str(run.topology.get("rule", {}).get("name", "?")),
        versions=run.versions["version"].nunique(),  # a round without updates makes none
        updates=len(run.updates),
        duration=run.duration,
        accuracy=float(last["accuracy"]),
        loss=float(last["loss"]),
        best_accuracy=float(evaluations["accuracy"].max()),
        ended=None if run.ended is None else run.ended.reason,
    )


def devices(run: Run) -> pd.DataFrame:
    """One row per device, in the manifest's order, indexed by `device`. The columns:

    `group`, `profile`, `cpu` (share of one host core), `samples`: as planned.
    `updates`: updates of this device that were applied.
    `staleness`: their mean staleness, in versions; NaN without updates.
    `share`: share of contributions: these updates ÷ all updates applied, whatever weight the rule gave
    them; NaN while there are none at all.
    `busy`: the share of the run's duration in which the device downloaded (dispatched to downloaded),
    trained (train_start to train_end) or uploaded (sent to arrived), overlaps counted once; NaN for a
    run without duration.
    `idle`: 1 − `busy`: it waited for the aggregator, thought, or was offline.

    Only applied updates tell what a device did. Of work that never became one (an update still on its
    way, or in the rule's buffer, or rejected, or lost in a crash) nothing is known here: it counts as
    idle.
    """
    none = run.updates.iloc[:0]
    own = dict(iter(run.updates.groupby("client", sort=False)))
    rows = [_device(run, name, own.get(name, none)) for name in _names(run)]
    return pd.DataFrame(rows, columns=_COLUMNS).set_index("device")


def groups(devices: pd.DataFrame) -> pd.DataFrame:
    """The rows of `devices` put together by their group, indexed by it: sums of `updates` and `share`,
    means of `staleness` (over the updates) and of `busy` and `idle` (over the devices), and `count`."""
    weighted = devices.assign(staleness=(devices["staleness"] * devices["updates"]).fillna(0.0))
    gathered = weighted.groupby("group", sort=False).agg(
        profile=("profile", "first"),
        count=("updates", "size"),
        updates=("updates", "sum"),
        staleness=("staleness", "sum"),
        share=("share", "sum"),
        busy=("busy", "mean"),
        idle=("idle", "mean"),
    )
    return gathered.assign(staleness=gathered["staleness"] / gathered["updates"].replace(0, np.nan))


_COLUMNS = (
    "device", "group", "profile", "cpu", "samples", "updates", "staleness", "share", "busy", "idle",
)  # fmt: skip


def _device(run: Run, name: str, updates: pd.DataFrame) -> dict[str, object]:
    planned = run.manifest.get("devices", {}).get(name, {})
    duration, total = run.duration, len(run.updates)
    intervals = [
        interval
        for begin, end in _WORK
        for interval in zip(updates[begin].tolist(), updates[end].tolist(), strict=True)
    ]
    busy = covered(intervals, duration) / duration if duration > 0 else np.nan
    return {
        "device": name,
        **{key: planned.get(key) for key in ("group", "profile", "cpu", "samples")},
        "updates": len(updates),
        "staleness": float(updates["staleness"].mean()) if len(updates) else np.nan,
        "share": len(updates) / total if total else np.nan,
        "busy": busy,
        "idle": 1 - busy,
    }


def covered(intervals: Iterable[tuple[float, float]], end: float) -> float:
    """Length of what `intervals` cover of [0, `end`], overlaps counted once.

    An interval with a NaN in it is not known, and covers nothing.
    """
    total = reached = 0.0
    for begin, stop in sorted(pair for pair in intervals if not np.isnan(pair).any()):
        begin, stop = max(begin, reached), min(stop, end)
        if stop > begin:
            total, reached = total + stop - begin, stop
    return total


def _names(run: Run) -> list[str]:
    """Every device of the plan, and whoever else contributed."""
    return list(dict.fromkeys([*run.manifest.get("devices", {}), *run.updates["client"]]))

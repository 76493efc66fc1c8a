"""State of each device over time, from a run's records (updates, unfinished rounds, actions, statuses)
and telemetry; without I/O and clock."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from agents.device_actions import BY_NAME, Hold, holds
from analysis.activity import HELD_AS, MIN_BUSY_SHARE
from analysis.load import Run

STATES = ("download", "mask", "train", "upload", "unfinished", "wait", "paused", "offline", "unpowered")
BUSY = ("train", "mask", "unfinished")
TRANSFER = ("download", "upload")

_PRECEDENCE = (
    "unpowered",
    "offline",
    "paused",
    "train",
    "mask",
    "upload",
    "download",
    "unfinished",
    "wait",
)
"""First the states that are used if several apply at the same moment."""
_TYPES: Mapping[str, type[np.generic]] = {
    "device": np.int32,
    "state": np.int8,
    "begin": np.float64,
    "end": np.float64,
    "update": np.int64,
}
_CODES = np.array([STATES.index(state) for state in _PRECEDENCE])
_WORK = {
    "download": ("dispatched", "downloaded"),
    "train": ("train_start", "train_end"),
    "upload": ("sent", "arrived"),
}
_TIMES = (*itertools.chain(*_WORK.values()), "masking")
"""Columns of `Run.updates` that states follow from."""


def timeline(run: Run, since: float = 0.0) -> pd.DataFrame:
    """Return the states of all devices as intervals, sorted by device and time. The intervals of a
    device cover the run from `since` to `run.duration` without gap or overlap.

    Columns: `device`, `state` (one of `STATES`), `begin` and `end` (s), and `update`, which is the row
    of `run.updates` for which the device worked, or −1 if there is no such row. The states:

    - `download`: from the dispatch until the client had the whole model.
    - `mask`: the client makes a mask of its update and shares of it. Summing shares counts as training.
    - `train`: from the first to the last local step.
    - `upload`: from the first byte until the aggregator had the whole update.
    - `paused`: frozen by the scenario or by hand.
    - `unpowered`: without power.
    - `offline`: cut off from the network, absent, or crashed. After an absence or a crash, the state
      lasts until the device reports that it is ready.
    - `unfinished`: in a round whose update is not applied, because the run ended, the device left, or
      the update was rejected or is still in the rule's buffer. The state lasts from the dispatch until
      the update arrived, or until no update was expected any more. An unknown part of this was training.
    - `wait`: in all other cases. The device waits for the aggregator, or has think time.

    Until a run has ended, and after a crash, unanswered dispatches are not recorded. `unfinished` is
    then inferred from telemetry: a device is in this state if its last update has arrived, and if it
    uses at least half of its CPU share.

    A model may arrive while the device trains. If several states apply, the first of unpowered, offline,
    paused, train, mask, upload, download, unfinished is used.
    """
    clients = run.updates["client"].cat.categories  # starts with the planned devices
    until = run.duration
    work = pd.concat([*_work(run, since), *_rounds(run, clients), _away(run, clients)])
    spans = _with_waiting(_flat(_clipped(work, since, until)), len(clients), since, until)
    return pd.DataFrame(
        {
            "device": pd.Categorical.from_codes(spans["device"], clients),
            "state": pd.Categorical.from_codes(_CODES[spans["state"]], pd.Index(STATES)),
            "begin": spans["begin"].to_numpy(),
            "end": spans["end"].to_numpy(),
            "update": spans["update"].to_numpy(),
        }
    )


def _spans(device: object, state: str, begin: object, end: object, update: object = -1) -> pd.DataFrame:
    """One row per interval. `device`: index in the list of clients. The column `state` has the index in
    `_PRECEDENCE`."""
    columns = {"device": device, "state": _PRECEDENCE.index(state), "begin": begin, "end": end}
    return pd.DataFrame({**columns, "update": update}).astype(_TYPES)


def _work(run: Run, since: float) -> list[pd.DataFrame]:
    rows = np.flatnonzero(run.updates["arrived"] >= since)
    device = run.updates["client"].cat.codes.to_numpy()[rows]
    order = np.argsort(device, kind="stable")  # in the order of `_flat`, so that it need not sort
    rows, device = rows[order], device[order]
    updates = {name: column.to_numpy()[rows] for name, column in run.updates[[*_TIMES]].items()}
    begin, end = (
        np.column_stack([updates[name] for name in names]) for names in zip(*_WORK.values(), strict=True)
    )
    states = np.array([_PRECEDENCE.index(state) for state in _WORK], np.int8)
    spans = pd.DataFrame(
        {
            "device": np.repeat(device.astype(_TYPES["device"]), len(_WORK)),
            "state": np.tile(states, len(rows)),
            "begin": begin.ravel(),
            "end": end.ravel(),
            "update": np.repeat(rows, len(_WORK)),
        }
    )
    masking = np.flatnonzero(updates["masking"] > 0)
    start = updates["train_start"][masking]
    begin = start - updates["masking"][masking]
    return [spans, _spans(device[masking], "mask", begin, start, rows[masking])]


def _rounds(run: Run, clients: pd.Index) -> list[pd.DataFrame]:
    """Rounds without an applied update; of a run that has not ended, some are inferred
    (`_computing`)."""
    recorded = run.unfinished
    device = _places(clients, recorded["client"])
    rounds = [_spans(device, "unfinished", recorded["dispatched"], recorded["until"])[device >= 0]]
    return rounds if run.ended is not None else [*rounds, _computing(run, clients)]


def _places(clients: pd.Index, names: pd.Series[str]) -> npt.NDArray[np.intp]:
    """Indices of `names` in `clients`; −1 for unknown names."""
    return clients.get_indexer(pd.Index(names.astype(object)))


def _computing(run: Run, clients: pd.Index) -> pd.DataFrame:
    """Intervals between two samples in which a device used at least `MIN_BUSY_SHARE` of its CPU share
    after its last update had arrived."""
    arrived = run.updates.groupby("client", observed=True)["arrived"].max()
    samples = run.telemetry[["device", "at", "cpu"]].sort_values(["device", "at"], kind="stable")
    before = samples.groupby("device", observed=True).shift()
    begin, device = before["at"], samples["device"].astype(object)
    share = device.map(run.devices.set_index("device")["cpu"]).astype(float)
    used = (samples["cpu"] - before["cpu"]) / (samples["at"] - begin)
    busy = used >= MIN_BUSY_SHARE * share  # false for NaN
    later = begin >= device.map(arrived).astype(float).fillna(-np.inf)
    place = _places(clients, samples["device"])
    return _spans(place, "unfinished", begin, samples["at"])[busy & later & (place >= 0)]


def _away(run: Run, clients: pd.Index) -> pd.DataFrame:
    """Offline or paused, by the records of the aggregator and of the scenario."""
    changes: list[tuple[float, str, Hold, bool]] = []
    for start in run.starts:
        changes += [(start.at, name, "down", True) for name in start.missing]
    for start in run.starts[1:]:  # in a resumed run, devices start as planned
        changes += [(start.at, name, "down", False) for name in start.clients]
        changes += [
            (start.at, name, what, False)
            for name in (*start.clients, *start.missing)
            for what in ("frozen", "cut off", "unpowered")
        ]
    for at, name, action in run.scenario[["at", "device", "action"]].itertuples(index=False):
        done = BY_NAME.get(action)  # actions with parameters do not keep devices from working
        for what, begins in () if done is None else holds(done).items():
            if begins or what != "down":  # `down` ends when the device reports that it is ready
                changes.append((at, name, what, begins))
    # After the actions of the same moment, so that a device that restarts immediately ends as `ready`.
    for at, name, state in run.statuses[["at", "client", "state"]].itertuples(index=False):
        if state in ("offline", "ready"):
            changes.append((at, name, "down", state == "offline"))
    held: dict[tuple[str, Hold], float] = {}
    rows = []
    for at, name, what, begins in sorted(changes, key=lambda one: one[0]):
        if begins:
            held.setdefault((name, what), at)
        elif (name, what) in held:
            rows.append((name, HELD_AS[what], held.pop((name, what)), at))
    rows += [(name, HELD_AS[what], since, np.inf) for (name, what), since in held.items()]
    away = pd.DataFrame(rows, columns=["name", "state", "begin", "end"])
    device = _places(clients, away["name"])
    spans = _spans(device, "offline", away["begin"], away["end"])
    spans = spans.assign(state=away["state"].map(_PRECEDENCE.index).astype(_TYPES["state"]))
    return spans[device >= 0]


def _clipped(spans: pd.DataFrame, since: float, until: float) -> pd.DataFrame:
    """Drop intervals that are empty, or whose begin or end is unknown."""
    begin, end = spans["begin"].clip(since, until), spans["end"].clip(since, until)
    return spans.assign(begin=begin, end=end)[end > begin]  # false for NaN


def _flat(spans: pd.DataFrame) -> pd.DataFrame:
    """Sort by device and begin. At each moment, keep the span of the state that comes first in
    `_PRECEDENCE`, and of several the one that began last."""
    spans = _sorted(spans)
    device, begin, end = (spans[name].to_numpy() for name in ("device", "begin", "end"))
    overlaps = (device[1:] == device[:-1]) & (begin[1:] < end[:-1])
    if not overlaps.any():
        return spans
    mixed = np.isin(device, device[1:][overlaps])
    return _sorted(pd.concat([spans[~mixed], _without_overlaps(spans[mixed])]))


def _sorted(spans: pd.DataFrame) -> pd.DataFrame:
    """Sort by device and begin. Usually most intervals are in this order."""
    device, begin = spans["device"].to_numpy(), spans["begin"].to_numpy()
    ahead = device[1:] - device[:-1]
    if ((ahead > 0) | ((ahead == 0) & (begin[1:] >= begin[:-1]))).all():
        return spans
    return spans.iloc[np.lexsort((begin, device))]


def _without_overlaps(spans: pd.DataFrame) -> pd.DataFrame:
    """Remove overlaps as `_flat` describes: go through all begins and ends in order of time, count the
    open spans of each state, and track which of them began last."""
    count = len(spans)
    rows = np.arange(2 * count, dtype=np.int32)
    at = np.concatenate([spans["begin"], spans["end"]])
    order = np.lexsort((at, np.tile(spans["device"].to_numpy(), 2)))
    at, begins, owner = at[order], order < count, rows[order] % max(count, 1)
    state = spans["state"].to_numpy()[owner]
    chosen = np.full_like(rows, -1)
    for code in reversed(np.unique(spans["state"])):
        mine = state == code
        changes = begins.astype(np.int8) * 2 - 1
        is_open = np.cumsum(changes * mine, dtype=np.int32) > 0  # all are closed before the next device
        begun = np.maximum.accumulate(rows * (mine & begins))
        np.copyto(chosen, owner[begun], where=is_open)
    stop = np.append(at[1:], 0.0)[: 2 * count]
    real = (chosen >= 0) & (stop > at)
    return spans.iloc[chosen[real]].assign(begin=at[real], end=stop[real])


def _with_waiting(spans: pd.DataFrame, devices: int, since: float, until: float) -> pd.DataFrame:
    """Fill the time between `spans` with waiting. Merge adjacent intervals of the same device, state and
    update."""
    if until <= since:
        return spans
    is_first = np.ones(len(spans) + 1, bool)  # the row after the last one, too
    is_first[1:-1] = spans["begin"].to_numpy()[1:] > spans["end"].to_numpy()[:-1]
    for name in ("device", "state", "update"):
        column = spans[name].to_numpy()
        is_first[1:-1] |= column[1:] != column[:-1]
    spans = spans[is_first[:-1]].assign(end=spans["end"].to_numpy()[is_first[1:]])
    device, begin, end = (spans[name].to_numpy() for name in ("device", "begin", "end"))
    # The gaps of a device: before each of its spans, and after the last one.
    places = np.searchsorted(device, np.arange(devices + 1))
    start, stop = np.insert(end, places[:-1], since), np.insert(begin, places[1:], until)
    owner = np.insert(device, places[1:], np.arange(devices))
    real = np.flatnonzero(stop > start)
    gaps = _spans(owner[real], "wait", start[real], stop[real])
    # Gaps have even places, each interval the odd one after the gap before it. Each device has one gap
    # more than intervals.
    order = np.concatenate([2 * (np.arange(len(spans)) + device) + 1, 2 * real])
    return pd.concat([spans, gaps]).iloc[np.argsort(order, kind="stable")]

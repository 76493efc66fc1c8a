"""Reader of a run directory, also while the run writes to it, with the provisional fidelity of a live
run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from agents.device_actions import SetCpu, from_json
from analysis import manifest as manifests
from analysis.features import RECORDS, STREAMS
from analysis.load import Follower, Run
from testbed.errors import BadInputError
from testbed.rundir.directory import RunDirectory

CPU_WINDOW_SECONDS = 10.0
"""Seconds of device time over which CPU use is averaged."""


def provisional_fidelity(run: Run) -> pd.DataFrame:
    """Return a table like `Run.fidelity`. `cpu` is a mean over the last seconds, so less while a device
    waits. Rates come from the last probe."""
    tables = [_table(run, "cpu", requested_cpu(run), _used(run))]
    devices: Mapping[str, Mapping[str, Any]] = run.manifest["devices"] if len(run.probes) else {}
    last = run.probes.groupby("device", observed=True)[["up", "down"]].last()
    for figure in ("up", "down"):
        rates = {name: (device.get("link") or {}).get(figure) for name, device in devices.items()}
        requested = pd.to_numeric(pd.Series(rates, dtype=object))
        tables.append(_table(run, figure, requested, last[figure]))
    return pd.concat(tables, ignore_index=True)


def _table(run: Run, figure: str, requested: pd.Series[float], got: pd.Series[float]) -> pd.DataFrame:
    names = run.devices["device"].astype(object)
    asked, measured = (np.asarray(one.reindex(names), np.float64) for one in (requested, got))
    with np.errstate(invalid="ignore", divide="ignore"):
        error = 100 * (measured - asked) / asked
    named = run.devices[["device", "group"]]
    return named.assign(figure=figure, asked=asked, got=measured, error=error)


def requested_cpu(run: Run) -> pd.Series[float]:
    """Share of a core that the last action on the CPU has set, else the planned one."""
    requested = run.devices.set_index(run.devices["device"].astype(object))["cpu"].astype(float)
    # Parse only actions on the CPU, because there may be very many on links.
    shares = run.scenario["details"].str.contains('"cpu"', regex=False)
    for device, details in run.scenario.loc[shares, ["device", "details"]].itertuples(index=False):
        action = from_json(json.loads(details))
        if isinstance(action, SetCpu) and device in requested.index:
            requested[device] = action.cpu
    return requested


def _used(run: Run) -> pd.Series[float]:
    """CPU seconds per second of device time, over the last seconds."""
    samples = run.telemetry[["device", "monotonic", "cpu"]]
    dilation = run.manifest.get("dilation", 1.0)
    since = samples["monotonic"].max() - CPU_WINDOW_SECONDS * dilation
    grouped = samples[samples["monotonic"] >= since].groupby("device", observed=True)
    spent = grouped[["monotonic", "cpu"]].last() - grouped[["monotonic", "cpu"]].first()
    used = spent["cpu"] / spent["monotonic"] * dilation
    used.index = used.index.astype(object)
    known: pd.Series[float] = used.where(np.asarray((spent["monotonic"] > 0) & (spent["cpu"] >= 0)))
    return known


_LIMITS = {"update": 500_000, "telemetry": 50_000, "rejected": 50_000, "unfinished": 200_000,
           "status": 200_000, "note": 1_000, "action": 1_000_000,
           **{one.kind.event: one.most for one in RECORDS if one.most},
           **{one.kind: one.most for one in STREAMS if one.most}}  # fmt: skip
"""Maximum number of rows in memory, by kind of record. All need at most about 200 MB."""
_LIMITS_LIVE = {**_LIMITS, "update": 100_000}
"""Fewer updates, because the charts of a live run are computed twice a second."""
_FILES = ("manifest.json", "events.jsonl", "telemetry.jsonl", "fidelity.json")


class Feed:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.run: Run | None = None
        """None if the run has no plan yet or cannot be read."""
        self.error = ""
        """Why the run cannot be read; empty if it can be read."""
        self.updates = 0
        """Updates applied so far, including those that are no longer in memory."""
        self.samples = 0
        """Samples so far, including those that are no longer in memory."""
        self.live = False
        self.generation = 0
        """Grows whenever the contents change."""
        self._follower: Follower | None = None
        self._file_states: tuple[tuple[int, int] | None, ...] = ()

    def refresh(self) -> None:
        states = tuple(_state(self.path / name) for name in _FILES)  # before reading, to miss no change
        live = is_live(self.path)
        if states == self._file_states and live == self.live:
            return
        self._file_states, self.live = states, live
        self.generation += 1
        try:
            self._read()
            self.error = "" if self.run is not None or self.live else _why_not_started(self.path)
        except FileNotFoundError as error:
            self.error = "" if self.run is None else f"{error.filename} was removed"
        except (ValueError, OSError) as error:
            self.error = f"cannot be read: {error}"
            self._follower = None  # start again when the files change

    @property
    def held(self) -> int:
        return 0 if self.run is None else len(self.run.updates)

    @property
    def held_samples(self) -> int:
        return 0 if self.run is None else len(self.run.telemetry)

    def _read(self) -> None:
        if self._follower is None:
            self._follower = Follower(self.path, _LIMITS_LIVE if self.live else _LIMITS)
        run = self._follower.run()
        if run.devices.empty:
            return
        self.updates, self.samples = (self._follower.rows[kind] for kind in ("update", "telemetry"))
        if run.fidelity.empty and not run.telemetry.empty:
            run = replace(run, fidelity=provisional_fidelity(run))
        self.run = run


def is_live(path: Path) -> bool:
    """False if the manifest cannot be read."""
    try:
        return RunDirectory(path).controller() is not None
    except BadInputError:
        return False


def _why_not_started(path: Path) -> str:
    """Empty if the run has not ended."""
    manifest = manifests.read(path / "manifest.json")
    if not manifest.get("controller") and not manifest.get("outcome"):
        return ""
    error = manifest.get("error") or "see the log of its controller"
    return f"The run ended ({manifest.get('outcome') or 'killed'}) before it started: {error}"


def _state(path: Path) -> tuple[int, int] | None:
    """Return size and modification time (ns); None if there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns

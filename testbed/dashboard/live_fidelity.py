"""Provisional fidelity of a live run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from agents.device_actions import SetCpu, from_json
from analysis.load import Run

CPU_WINDOW_SECONDS = 10.0
"""Seconds of device time over which CPU use is averaged."""


def provisional(run: Run) -> pd.DataFrame:
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

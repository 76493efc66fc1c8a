"""Actions on devices as vertical marks on a time axis, and as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

import numpy as np

from agents.device_actions import SetCpu, SetLink, from_json
from analysis.charts.chart import COLORS, Chart, Layer, arrays
from analysis.features import PARTS
from analysis.load import Run
from analysis.names import distinct

_MAX_MARKS = 30
_AXIS_CHARACTERS = 70
"""Characters that fit above a plot of the usual width."""
_KINDS, _NAMED = 4, 2
"""Kinds of action that a mark lists, and devices that it names for each. Others are counted: `and 2
more`, `4 devices`."""
_UNITS = {"up": (1e-3, " kbit/s"), "down": (1e-3, " kbit/s"), "rtt": (1e3, " ms"),
          "jitter": (1e3, " ms"), "loss": (100.0, "%")}  # fmt: skip
"""Factor and unit of each field of a link."""


@dataclass(frozen=True, slots=True)
class _MarkedAction:
    at: float
    action: str
    device: str
    run: Run


@dataclass(frozen=True, slots=True)
class ActionMark:
    """Actions at about the same time."""

    at: float
    """First action, in seconds of device time."""
    what: str
    """Description such as `crash pi-1; link up 100 kbit/s 4 devices`, or `fedavg: crash pi-1` if not all
    runs have it."""
    run: Run | None
    """None if several runs have these actions, or if the chart has only one run."""


@dataclass(frozen=True, slots=True)
class ActionMarks:
    marks: tuple[ActionMark, ...]
    """Marks in order of time. On charts they are numbered 1, 2, 3, …"""
    notes: tuple[str, ...]
    """Which actions the marks combine or leave out."""

    @property
    def key(self) -> tuple[str, ...]:
        """Lines such as `3: crash pi-1 (12.0 s)`."""
        return tuple(f"{n}: {mark.what} ({mark.at:.1f} s)" for n, mark in enumerate(self.marks, start=1))


def marks(runs: Sequence[Run]) -> ActionMarks:
    """Actions of the same second have one mark, at the time of the first. If that gives more than 30
    marks, those of the same 2, 4, 8, … seconds have one. A link that follows a trace may change twice a
    second, and has no marks for that."""
    marked: list[_MarkedAction] = []
    unmarked = 0
    for run in runs:
        scenario = run.scenario[["at", "device", "source", "details"]]
        by_trace = (
            scenario["device"].isin(_traced(run))
            & (scenario["source"] == "scenario")
            & scenario["details"].astype(str).str.contains('"link"', regex=False)
        )
        unmarked += int(by_trace.sum())
        rows = scenario[~by_trace].itertuples(index=False)
        marked += [_MarkedAction(at, describe(details), device, run) for at, device, _, details in rows]
    marked.sort(key=lambda one: one.at)
    times, width_s = np.array([one.at for one in marked]), 1
    while len(np.unique(times // width_s)) > _MAX_MARKS:
        width_s *= 2
    buckets: dict[float, list[_MarkedAction]] = {}
    for one in marked:
        buckets.setdefault(one.at // width_s, []).append(one)
    names = {id(run): name for name, run in distinct(runs).items()} if len(runs) > 1 else {}
    grouped = f"each vertical mark stands for up to {width_s} s of the scenario" if width_s > 1 else ""
    omitted = f"{unmarked:,} link changes from traces are not marked" if unmarked else ""
    return ActionMarks(
        tuple(_mark(bucket, names) for bucket in buckets.values()),
        tuple(filter(None, (grouped, omitted))),
    )


def with_actions(
    chart: Chart, runs: Sequence[Run], since: float = 0.0, colors: Mapping[int, str] | None = None
) -> Chart:
    """Add vertical marks for the actions at `since` seconds or later. The chart's x axis must be device
    time.

    A mark of a single run has its colour; `colors` has these by `id` of the run. Marks have descriptions
    where there is space, else numbers, which the chart's `key` explains. The chart's remarks say which
    actions are combined or left out.
    """
    found = marks(runs)
    shown = [(number, mark) for number, mark in enumerate(found.marks, start=1) if mark.at >= since]
    until = max([since, *(run.duration for run in runs), *(mark.at for mark in found.marks[-1:])])
    at = [mark.at for _, mark in shown]
    labels = _labels(at, [mark.what for _, mark in shown], since, until)
    words = labels is not None
    if labels is None:
        labels = _numbers(at, [number for number, _ in shown], since, until)
    hues = [(colors or {}).get(id(mark.run), "grey") for _, mark in shown]
    columns = arrays(
        x=np.array(at, np.float64),
        what=np.array([f"{number}: {mark.what}" for number, mark in shown], str),
        label=np.array(labels, str),
        color=np.array([COLORS.index(hue) for hue in hues], np.int64),
    )
    hover = {"scenario": "what", "at (s)": "x"}
    layer = Layer("scenario", "rules", columns, color="grey", legend=False, hover=hover)
    key = () if words else tuple(found.key[number - 1] for number, _ in shown)
    return replace(chart, layers=(*chart.layers, layer), key=key).with_remarks(*found.notes)


def _mark(bucket: Sequence[_MarkedAction], names: Mapping[int, str]) -> ActionMark:
    """`names`: names of the chart's runs, by `id`; empty if the chart has one run."""
    runs = {id(one.run): one.run for one in bucket}
    done: dict[int, dict[str, dict[str, None]]] = {key: {} for key in runs}
    for one in bucket:
        done[id(one.run)].setdefault(one.action, {})[one.device] = None
    runs_by_text: dict[str, list[str]] = {}
    for key, actions in done.items():
        runs_by_text.setdefault(_describe_all(actions), []).append(names.get(key, ""))
    if len(runs_by_text) == 1 and len(runs) >= len(names):
        return ActionMark(bucket[0].at, next(iter(runs_by_text)), None)
    texts = [f"{', '.join(of_runs)}: {text}" for text, of_runs in runs_by_text.items()]
    return ActionMark(bucket[0].at, "; ".join(texts), bucket[0].run if len(runs) == 1 else None)


def _labels(at: Sequence[float], texts: Sequence[str], since: float, until: float) -> list[str] | None:
    """`texts`, each centred above its mark; None if they do not all fit within the axis without
    overlap."""
    free = since
    for middle, text in zip(at, texts, strict=True):
        half = (len(text) + 2) / 2 / _AXIS_CHARACTERS * (until - since)
        if middle - half < free or middle + half > until:
            return None
        free = middle + half
    return list(texts)


def _numbers(at: Sequence[float], numbers: Sequence[int], since: float, until: float) -> list[str]:
    """Marks that are close together have one label such as `3–5`, at the middle one."""
    clusters: list[list[int]] = []

    def text(cluster: list[int]) -> str:
        first, last = numbers[cluster[0]], numbers[cluster[-1]]
        return str(first) if first == last else f"{first}–{last}"

    def middle(cluster: list[int]) -> int:
        return cluster[len(cluster) // 2]

    def clash(one: list[int], other: list[int]) -> bool:
        room = ((len(text(one)) + len(text(other))) / 2 + 1) / _AXIS_CHARACTERS * (until - since)
        return at[middle(other)] - at[middle(one)] < room

    for place in range(len(at)):
        clusters.append([place])
        while len(clusters) > 1 and clash(clusters[-2], clusters[-1]):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    labels = [""] * len(at)
    for cluster in clusters:
        labels[middle(cluster)] = text(cluster)
    return labels


def _traced(run: Run) -> set[str]:
    groups = run.topology.get("devices") or ()
    traced = [group["name"] for group in groups if (group.get("link") or {}).get("trace")]
    return set(run.devices.loc[run.devices["group"].isin(traced), "device"])


def _describe_all(devices_by_action: Mapping[str, Mapping[str, None]]) -> str:
    """Text such as `crash pi-1; link up 100 kbit/s 4 devices`."""
    parts = []
    for action, devices in islice(devices_by_action.items(), _KINDS):
        names = ", ".join(devices) if len(devices) <= _NAMED else f"{len(devices)} devices"
        parts.append(f"{action} {names}")
    if len(devices_by_action) > _KINDS:
        parts.append(f"and {len(devices_by_action) - _KINDS} more")
    return "; ".join(parts)


@lru_cache(4096)
def describe(details_json: str) -> str:
    """`details` of a row of `Run.scenario` as text: `crash`, `link up 100 kbit/s`."""
    details = json.loads(details_json)
    match from_json(details):
        case SetCpu(share):
            return f"cpu {share:g}"
        case SetLink(changes):
            return "link " + ", ".join(
                f"{name} {_value(name, value)}" for name, value in changes.items()
            )
        case action:
            texts = (part.describe(action) for part in PARTS)
            return next(filter(None, texts), str(details.get("action")))


def _value(name: str, value: object) -> str:
    if not isinstance(value, float | int):
        return "unlimited" if value is None else str(value)
    scale, unit = _UNITS.get(name, (1.0, ""))
    return f"{value * scale:g}{unit}"

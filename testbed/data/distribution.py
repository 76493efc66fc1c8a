"""Distribution of samples and classes among the devices, computed before a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from analysis.charts.chart import Axis, Chart, Layer, arrays, group_ticks
from testbed.data import datasets, preparation
from testbed.data.preparation import Prepared
from testbed.topology import Topology

_MAX_DRAWN = 2_000
"""If there are more devices in a chart, only every n-th device is shown."""
_MAX_NAMED = 10
"""If a chart has more devices, it shows names of groups, and devices are sorted by group and number of
samples."""
_APART = 0.12
"""Share of the chart's width between names of groups. Closer names would overlap."""


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    device: str
    group: str
    samples: int
    """Number of training samples."""
    labels: Sequence[int] | None = None
    """Samples per class; None if labels are not classes."""
    least: float | None = None
    """Lowest label; None if labels are not numbers."""
    mean: float | None = None
    """Mean label; None if labels are not numbers."""
    greatest: float | None = None
    """Highest label; None if labels are not numbers."""


@dataclass(frozen=True, slots=True)
class SampleSummary:
    training_samples: int
    """Number in the dataset."""
    evaluated_on: int
    """Number of samples on which the model is evaluated."""
    shape: tuple[int, ...]
    """Shape of one input."""
    remarks: tuple[str, ...]
    """Sentences about samples that were set aside or left out."""
    devices: Sequence[DeviceSamples]


@dataclass(frozen=True, slots=True)
class SampleDistribution:
    """Training samples of each device."""

    name: str
    """Dataset and partition scheme."""
    devices: tuple[str, ...]
    groups: tuple[str, ...]
    """In the order of `devices`."""
    samples: NDArray[np.int64]
    """Number of samples of each device, shape (devices,)."""
    counts: NDArray[np.int64]
    """Samples by device and class, shape (devices, classes); (devices, 0) if labels are not classes."""
    labels: Mapping[str, tuple[float, float, float]]
    """Device -> lowest, mean and highest label, for devices with samples; empty if labels are not
    numbers."""
    total: int
    """Training samples of the dataset, without transformed copies."""
    test: int
    """Samples on which the model is evaluated."""
    shape: tuple[int, ...]
    """Shape of one input."""
    remarks: tuple[str, ...]
    """Sentences about samples that were set aside or left out."""

    @property
    def classes_held(self) -> NDArray[np.int64]:
        """Classes that each device has samples of, shape (devices,)."""
        found: NDArray[np.int64] = (self.counts > 0).sum(axis=1)
        return found

    @property
    def skew(self) -> float:
        """Mean total variation distance between the class shares of a device that has samples and those
        of all devices together: 0 if all devices have the same shares, near 1 if each device has a class
        of its own."""
        whole = self.counts.sum(axis=0) / self.counts.sum()
        own = self.counts[self.samples > 0]
        own = own / own.sum(axis=1, keepdims=True)
        return float(np.abs(own - whole).sum(axis=1).mean() / 2)

    def draw(self, to: Path) -> None:
        """The file is .png, .pdf or .svg."""
        from analysis.charts import paper

        paper.stack(charts(self)).savefig(to)

    def summary(self) -> SampleSummary:
        """For programs."""
        devices = [
            DeviceSamples(
                device,
                self.groups[place],
                int(self.samples[place]),
                self.counts[place].tolist() if self.counts.size else None,
                *self.labels.get(device, ()),
            )
            for place, device in enumerate(self.devices)
        ]
        return SampleSummary(self.total, self.test, self.shape, self.remarks, devices)


def distribution(topology: Topology, prepared: Prepared) -> SampleDistribution:
    groups = tuple(group.group_name for group in topology.devices for _ in group.device_names)
    y = prepared.train.y
    numbers = y.ndim == 1 and y.dtype.kind == "f"
    chosen, task = datasets.source(topology), topology.task
    return SampleDistribution(
        task.name if chosen is None else f"{chosen.name}, {task.partition.scheme} partition",
        topology.device_names,
        groups,
        np.array([len(chosen) for chosen in prepared.indices.values()]),
        np.array([*preparation.label_counts(prepared).values()], np.int64).reshape(len(groups), -1),
        {
            name: (float(own.min()), float(own.mean()), float(own.max()))
            for name, own in ((name, y[chosen]) for name, chosen in prepared.indices.items())
            if len(own)
        }
        if numbers
        else {},
        prepared.total,
        len(prepared.test),
        prepared.train.x.shape[1:],
        prepared.remarks,
    )


def charts(found: SampleDistribution) -> list[Chart]:
    """One chart has the number of samples of each device. If labels are classes, another has the class
    shares, darker for a larger share."""
    every = -(-len(found.devices) // _MAX_DRAWN)
    order = np.arange(len(found.devices))
    if len(order) > _MAX_NAMED:
        group = {name: place for place, name in enumerate(dict.fromkeys(found.groups))}
        order = np.lexsort((-found.samples, np.array([group[name] for name in found.groups])))
    places = order[::every]
    x = np.arange(len(places))
    names = [found.devices[place] for place in places]
    ticks = group_ticks(names, [found.groups[place] for place in places], _MAX_NAMED)
    axis = Axis("device", ticks=_drop_overlapping(ticks, len(places)))
    sizes = arrays(x=x, y=found.samples[places], width=np.full(len(x), 0.9 if len(x) < 100 else 1.0))
    note = f"every {every}th of {len(found.devices):,} devices" if every > 1 else ""
    layer = Layer("samples", "bars", sizes, legend=False)
    made = [Chart("Training samples", axis, Axis("samples", limits=(0.0, None)), (layer,), note=note)]
    if found.counts.size:
        counts = found.counts[places]
        device, label = np.nonzero(counts)
        share = counts[device, label] / counts.sum(axis=1)[device]
        columns = arrays(
            y=label.astype(float),
            height=np.ones(len(label)),
            begin=device - 0.5,
            end=device + 0.5,
            color=np.zeros(len(label), int),
            shade=0.1 + 0.9 * share,
        )
        heat = Layer("classes", "spans", columns, legend=False)
        classes = Axis("class", limits=(-0.5, counts.shape[1] - 0.5))
        made.append(Chart("Share of each class in a device's samples", axis, classes, (heat,)))
    return made


def _drop_overlapping(ticks: Mapping[float, str], width: int) -> dict[float, str]:
    if width <= _MAX_NAMED:
        return dict(ticks)
    kept: dict[float, str] = {}
    for place in sorted(ticks):
        if not kept or place - max(kept) > _APART * width:
            kept[place] = ticks[place]
    return kept

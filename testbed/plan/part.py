"""Interface of what features add to the plan of a run. The features are in `testbed.plan.features`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.topology.yamlfile import Problem, Where

if TYPE_CHECKING:
    from agents.config import ClientConfig
    from testbed.plan.catalog import Catalog
    from testbed.plan.machines import HostResources
    from testbed.plan.planned_devices import Plan, PlannedDevice
    from testbed.plan.rounds import Round
    from testbed.topology import Topology
    from testbed.topology.devices import DeviceGroup


FileToRead = tuple[Where, Hashable, Callable[[Path], object]]
"""Place in the topology that names the file; the key of the content in the catalog, so that files with
equal keys are read once; and a function that reads the file, from the topology's folder. It raises
OSError, and ValueError that names the file."""
FleetNumber = tuple["Callable[[DeviceGroup, PlannedDevice], float | None]", Callable[[float], str]]
"""A number that may differ among the drawn devices of a group, and how a person reads it."""


def _add_nothing(*_: object) -> tuple[()]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPart:
    """A feature leaves out the functions that it does not need."""

    attribute: str = ""
    """Attribute of `PlannedDevice` that the feature sets, which is also the key in the manifest; empty
    if there is none."""
    files: Callable[[Topology], Iterable[FileToRead]] = _add_nothing
    lacks: Callable[[Topology, Catalog], Iterable[Problem]] = _add_nothing
    """Problems of the topology with the catalog's profiles."""
    refusals: Callable[[Topology, str, HostResources], Iterable[Problem]] = _add_nothing
    """Problems of the topology with a runtime, which is given by name, and a host."""
    device: Callable[[PlannedDevice, DeviceGroup, Catalog], PlannedDevice] = lambda device, *_: device
    """Completes the device that stands for a group."""
    place: Callable[[Plan, Topology, HostResources], tuple[Plan, Sequence[Problem]]] = lambda made, *_: (
        made,
        (),
    )
    """Gives the devices their parts of the machines, and finds problems with them."""
    notes: Callable[[Topology, Plan], Iterable[str]] = _add_nothing
    """Sentences on what is emulated differently, or what the user should know."""
    remarks: Callable[[Topology, Plan, Mapping[str, Round]], Iterable[str]] = _add_nothing
    """Sentences before a start, from the expected round of each device."""
    columns: Callable[[Plan, Mapping[str, Round]], Mapping[str, Mapping[str, Any]]] = lambda *_: {}
    """Device -> columns of its `DeviceRow`."""
    group_columns: Callable[
        [Plan, Mapping[str, Round], Mapping[str, Sequence[str]]], Mapping[str, Mapping[str, Any]]
    ] = lambda *_: {}
    """Columns of each group for people. The third argument has the groups' devices."""
    numbers: Mapping[str, FleetNumber] = field(default_factory=dict)
    """Numbers by their key in the topology, such as `link.up`."""
    init: Callable[[PlannedDevice], Mapping[str, Any]] = lambda _: {}
    """Values of `FeatureSettings` for the device's init."""
    client: Callable[[ClientConfig, PlannedDevice], ClientConfig] = lambda config, _: config
    """Completes the configuration of the device's client."""
    entry: Callable[[PlannedDevice], Any] = lambda _: None
    """The device's value in the manifest, if it has `attribute`."""
    brings_back: Callable[[PlannedDevice], bool] = lambda _: False
    """Whether the device returns by itself after it has gone."""

"""Resolution of what a topology leaves to profiles: link classes, CPU shares and power of devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from testbed.errors import BadInputError
from testbed.plan.calibration import Calibration, share
from testbed.topology import Topology, profiles, traces
from testbed.topology.devices import DeviceGroup, Link
from testbed.topology.fields import Model
from testbed.topology.profiles import Profiles
from testbed.topology.yamlfile import Problem, Where


def resolved(topology: Topology) -> Topology:
    """The topology with link classes and the profiles' power filled in. Raises BadInputError for a name
    that no profile has."""
    if not any(_names(group) for group in topology.devices):
        return topology
    known = profiles.load(Path(topology.source.name).parent)
    if problems := list(_unknown(topology, known)):
        raise topology.source.error(problems)
    groups = [_with_power(_with_link(group, known), known) for group in topology.devices]
    traced = [_with_trace(topology, index, group) for index, group in enumerate(groups)]
    return topology.with_devices(tuple(traced))


def needs_calibration(topology: Topology) -> bool:
    """Whether some device's share follows from its profile and this host's speed."""
    return any(group.profile is not None and group.cpu is None for group in topology.devices)


def on_host(topology: Topology, host: Calibration) -> Topology:
    """The topology with the CPU shares that the profiles' speeds make on `host`. Raises
    BadInputError."""
    known = profiles.load(Path(topology.source.name).parent)
    problems, groups = [], []
    for index, group in enumerate(topology.devices):
        changed = group
        if group.profile is not None and group.cpu is None:
            try:
                cpu = share(group.profile, known.device(group.profile), host)
                changed = group.model_copy(update={"cpu": round(cpu, 4)})
            except BadInputError as error:
                where: Where = ("devices", index, "profile")
                problems.append(topology.source.problem(where, str(error)))
        groups.append(changed)
    if problems:
        raise topology.source.error(problems)
    return topology.with_devices(tuple(groups))


def _names(group: DeviceGroup) -> bool:
    link = group.link
    return group.profile is not None or (link is not None and (link.kind or link.trace) is not None)


def _unknown(topology: Topology, known: Profiles) -> Iterator[Problem]:
    for index, group in enumerate(topology.devices):
        where: Where = ("devices", index)
        if group.profile is not None and group.cpu is None and group.profile not in known.devices:
            guess = profiles.guess(group.profile, known.devices)
            yield topology.source.problem((*where, "profile"), f"no profile is called this; {guess}")
        kind = None if group.link is None else group.link.kind
        if kind is not None and kind not in known.links:
            guess = profiles.guess(kind, known.links)
            yield topology.source.problem(
                (*where, "link", "class"), f"no link class is called this; {guess}"
            )


def _with_trace(topology: Topology, index: int, group: DeviceGroup) -> DeviceGroup:
    """Its files by their absolute paths, so that the run directory's topology finds them too."""
    if group.link is None or group.link.trace is None:
        return group
    folder = Path(topology.source.name).parent.absolute()
    try:
        traces.read(group.link.trace, folder)
    except (ValueError, OSError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        where: Where = ("devices", index, "link", "trace")
        raise topology.source.error([topology.source.problem(where, reason)]) from error
    paths = {key: getattr(group.link.trace, key) for key in ("up", "down", "csv")}
    found = {key: str(folder / path) for key, path in paths.items() if path is not None}
    link = group.link.model_copy(update={"trace": group.link.trace.model_copy(update=found)})
    return group.model_copy(update={"link": link})


def _with_link(group: DeviceGroup, known: Profiles) -> DeviceGroup:
    """What the topology says itself wins; its delay is another word for the class's rtt."""
    link = group.link
    if link is None or link.kind is None:
        return group
    figures = tuple(name for name in type(link).model_fields if name != "kind")
    of_class = _given(known.link(link.kind), figures)
    own = _given(link, figures)
    if "delay" in own:
        of_class.pop("rtt", None)
    merged = dict.fromkeys(type(link).model_fields) | of_class | own
    return group.model_copy(update={"link": Link.model_construct(**merged)})


def _with_power(group: DeviceGroup, known: Profiles) -> DeviceGroup:
    profile = known.devices.get(group.profile or "")
    if group.power is not None or profile is None:
        return group
    return group.model_copy(update={"power": profile.power})


def _given(model: Model, names: Iterable[str]) -> dict[str, Any]:
    values = {name: getattr(model, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}

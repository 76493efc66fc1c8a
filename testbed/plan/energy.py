"""Energy settings of the planned devices, from topology, profiles and charger traces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from agents.energy.settings import ChargerConfig, EnergyConfig
from testbed.topology import Topology, scenario
from testbed.topology.energy import EnergySettings, PowerFigures
from testbed.topology.profiles import DeviceProfile
from testbed.topology.scenario import ScenarioEntry
from testbed.topology.yamlfile import Problem, Where

_EXAMPLES = {"idle": "idle: 2W", "core": "core: 1.5W", "battery.capacity": "capacity: 18Wh"}


def energy_of(
    energy: EnergySettings, cpu: float | None, profile: DeviceProfile | None, trace: ChargerConfig | None
) -> EnergyConfig:
    """`cpu`: CPU share of the group in cores. `trace`: content of the charger's trace file."""
    cores = max(1, math.ceil(cpu or 1.0))
    if profile is not None:
        cores = profile.cores or cores
    return energy.plain(_figures(profile), cores, trace)


def energy_problems(topology: Topology, profiles: Mapping[str, DeviceProfile]) -> Iterator[Problem]:
    """A problem is a lacking figure, or a scenario entry that needs a battery or charger which a device
    does not have."""
    for index, group in enumerate(topology.devices):
        profile = profiles.get(group.profile or "")
        missing = [] if group.energy is None else group.energy.missing(_figures(profile))
        for key in missing:
            where: Where = ("devices", index, "energy")
            if group.profile is None:
                why = f"{key} is missing: add it, such as {_EXAMPLES[key]}"
            else:
                why = (
                    f"{key} is missing, and the profile {group.profile} has none, because no published "
                    f"figure is known: add your own, such as {_EXAMPLES[key]}"
                )
            yield topology.source.problem(where, why, at_key=True)
    yield from _scenario_problems(topology.scenario, topology)


def _scenario_problems(entries: Sequence[ScenarioEntry], topology: Topology) -> Iterator[Problem]:
    if not any(entry.acts_on_battery for entry in entries):
        return
    by_group = scenario.devices_by_group(topology.devices)
    groups = {device: group for group in topology.devices for device in group.device_names}
    for index, entry in enumerate(entries):
        if not entry.acts_on_battery:
            continue
        where: Where = ("scenario", index, entry.verb)
        for device in scenario.expand(entry.targets, by_group):
            energy = groups[device].energy
            if energy is None or energy.battery is None:
                message = f"{device} has no battery: add energy with a battery to its group"
                yield topology.source.problem(where, message)
                break
            if entry.verb == "charge" and entry.watts is None and energy.charger is None:
                message = f"{device} has no charger: add watts, such as watts: 10W"
                yield topology.source.problem(where, message)
                break


def _figures(profile: DeviceProfile | None) -> PowerFigures | None:
    return None if profile is None else profile.energy

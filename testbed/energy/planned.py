"""Energy settings and expected power of the planned devices, and how long their batteries last."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from agents.energy import BatteryConfig, ChargerConfig, EnergyAccount, EnergyConfig, microwatts
from agents.texts import name_list
from agents.timing.nanoseconds import Nanoseconds, to_seconds
from testbed.energy import schema
from testbed.energy.schema import PowerFigures
from testbed.topology import Topology, scenario
from testbed.topology.devices import DeviceGroup
from testbed.topology.profiles import DeviceProfile
from testbed.topology.scenario import ScenarioEntry
from testbed.topology.yamlfile import Problem, Where
from testbed.traits import runtime_names, traits

if TYPE_CHECKING:  # the plan imports this module
    from testbed.plan.catalog import Catalog
    from testbed.plan.machines import HostResources
    from testbed.plan.part import FileToRead, FleetNumber
    from testbed.plan.planned_devices import Plan, PlannedDevice
    from testbed.plan.rounds import Round

_EXAMPLES = {"idle": "idle: 2W", "core": "core: 1.5W", "battery.capacity": "capacity: 18Wh"}


def files(topology: Topology) -> Iterator[FileToRead]:
    """Traces of chargers."""
    for index, group in enumerate(topology.devices):
        charger = None if group.energy is None else group.energy.charger
        if charger is not None and charger.trace is not None:
            where: Where = ("devices", index, "energy", "charger", "trace")
            yield where, charger, partial(schema.read_trace, charger)


def with_energy(device: PlannedDevice, group: DeviceGroup, catalog: Catalog) -> PlannedDevice:
    profile = catalog.profile(group.profile)
    power = group.power or (None if profile is None else profile.power)
    if power is not None:
        device = replace(device, power=power.plain())
    if group.energy is None:
        return device
    cores = max(1, math.ceil(group.cpu or 1.0))
    if profile is not None:
        cores = profile.cores or cores
    trace = catalog.content(group.energy.charger, ChargerConfig)
    return replace(device, energy=group.energy.plain(_figures(profile), cores, trace))


def lacks(topology: Topology, catalog: Catalog) -> Iterator[Problem]:
    """A problem is a lacking figure, or a scenario entry that needs a battery or charger which a device
    does not have."""
    for index, group in enumerate(topology.devices):
        profile = catalog.profile(group.profile)
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


def refusals(topology: Topology, runtime: str, _: HostResources) -> Iterator[Problem]:
    if "energy" not in traits(runtime).lacks:
        return
    for index, group in enumerate(topology.devices):
        if group.energy is not None:
            yield topology.source.problem(
                ("devices", index, "energy"),
                f"the {runtime} runtime does not count energy yet: remove it, or use the "
                f"{runtime_names(lambda t: 'energy' not in t.lacks)} runtime",
                at_key=True,
            )


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


# Expected power of the planned devices, and how long their batteries last.
#
# There are two estimates for each device: without any work, and if it trains round after round without
# waiting for a model. A run is between the two. The battery is computed with the same account as in a
# run (`agents.energy`), at constant power, with the charger of the topology.

_MAX_NAMED = 4
_MAX_STEPS = 20_000
"""Changes of the charger's power to look at for one estimate."""


@dataclass(frozen=True, kw_only=True)
class EnergyColumns:
    """Expected power of a device. Times are device times from the start of the run. They are infinite if
    the battery does not get too low, and if a changing charger was looked at for as long as possible
    without a power-off."""

    idle_w: float | None = None
    """Power without work, in watts; None if the device's energy is not counted."""
    working_w: float | None = None
    """Mean power while the device trains round after round, in watts; None if its round is unknown."""
    battery_idle_s: float | None = None
    """Seconds until the first power-off without work; None without a battery."""
    battery_working_s: float | None = None
    """Seconds until the first power-off if the device trains round after round; None also if the power
    is unknown."""


@dataclass(frozen=True, kw_only=True)
class BatteryLife(EnergyColumns):
    returns: bool
    """Whether the charger charges the device again after a power-off. True without a battery."""


def battery_lives(plan: Plan, rounds: Mapping[str, Round]) -> dict[str, BatteryLife]:
    found: dict[str, BatteryLife] = {}
    known: dict[tuple[int, float | None, float | None], BatteryLife] = {}
    for device in plan.devices:
        if device.energy is None:
            continue
        work = _work(device, device.energy, rounds[device.name])
        key = id(device.energy), device.cpu, work
        if key not in known:
            known[key] = _life(device.energy, device.cpu, work)
        found[device.name] = known[key]
    return found


def _work(device: PlannedDevice, energy: EnergyConfig, one: Round) -> float | None:
    """Mean power in watts in addition to the idle power; None if the round is unknown."""
    if one.lacks:
        return None
    if not 0 < one.seconds < math.inf:
        return 0.0
    transfer = energy.transfer(sent=one.sent, received=one.received)
    return (energy.busy * one.computing + transfer) / one.seconds


def _life(energy: EnergyConfig, cpu: float | None, work: float | None) -> BatteryLife:
    idle = _first_power_off(EnergyAccount(energy, cpu), 0.0)
    account = EnergyAccount(energy, cpu)
    working = None if work is None else _first_power_off(account, work)
    charges = energy.charger is not None and any(energy.charger.watts)
    return BatteryLife(
        idle_w=energy.idle,
        working_w=None if work is None else energy.idle + work,
        battery_idle_s=None if energy.battery is None else idle,
        battery_working_s=None if energy.battery is None else working,
        returns=energy.battery is None or charges,
    )


def _first_power_off(account: EnergyAccount, work: float) -> float:
    """Return the time in seconds, if the device always draws `work` watts in addition to its idle power;
    infinity if there is none. `account` is advanced."""
    power = microwatts(work)
    at: Nanoseconds = 0
    for _ in range(_MAX_STEPS):
        ahead = account.outlook(power)
        if ahead is None:
            break
        if ahead.switches:
            return to_seconds(ahead.at)
        account.advance(ahead.at, power * (ahead.at - at))
        at = ahead.at
    return math.inf


def columns(plan: Plan, rounds: Mapping[str, Round]) -> dict[str, dict[str, Any]]:
    names = [one.name for one in fields(EnergyColumns)]
    lives = battery_lives(plan, rounds)
    return {device: {name: getattr(one, name) for name in names} for device, one in lives.items()}


def group_columns(
    plan: Plan, rounds: Mapping[str, Round], groups: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, str | None]]:
    """`power` (idle to working), `battery idle` and `battery working`. Columns that no device of the
    plan has are left out."""
    found = battery_lives(plan, rounds)
    return {name: _group_columns(found, devices) for name, devices in groups.items()} if found else {}


def _group_columns(found: Mapping[str, BatteryLife], names: Sequence[str]) -> dict[str, str | None]:
    own = [found[name] for name in names if name in found]
    powers = [power for one in own for power in (one.idle_w, one.working_w)]
    columns = {"power": _span(powers, _watts)}
    if any(one.battery_idle_s is not None for one in found.values()):
        columns["battery idle"] = _span([one.battery_idle_s for one in own], time_text)
        columns["battery working"] = _span([one.battery_working_s for one in own], time_text)
    return columns


def _span(values: Sequence[float | None], text: Callable[[float], str]) -> str | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, high = text(min(known)), text(max(known))
    return low if low == high else f"{low} to {high}"


def _watts(value: float) -> str:
    return f"{value:.3g}W"


def time_text(seconds: float) -> str:
    """Format a time with three digits in the largest unit of which it has at least two, such as `26.4h`;
    `for ever` if it is infinite."""
    if math.isinf(seconds):
        return "for ever"
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g}{unit}"
    return f"{seconds:.3g}s"


def remarks(topology: Topology, plan: Plan, rounds: Mapping[str, Round]) -> Iterator[str]:
    """Yield sentences on devices that power off before the end of the run, and warnings of devices that
    can never return. A device that an entry of the scenario charges is not warned of."""
    found = battery_lives(plan, rounds)
    end = topology.stop.build().after
    limit = math.inf if end is None else end
    until = "" if end is None else f", before the run ends after {time_text(end)} (stop.after)"
    idle = {name: one.battery_idle_s for name, one in found.items()}
    working = {name: one.battery_working_s for name, one in found.items()}
    idle = {name: at for name, at in idle.items() if _within(at, limit)}
    working = {name: at for name, at in working.items() if _within(at, limit) and name not in idle}
    for times, how in (
        (idle, "even without work"),
        (working, "if they train round after round"),
    ):
        if times:
            listed, after = name_list([*times], _MAX_NAMED), _span([*times.values()], time_text)
            yield f"The batteries of {listed} are too low after {after} {how}{until}: they power off."
    charged = set(_charged(topology))
    lost = [name for name in (*idle, *working) if not found[name].returns and name not in charged]
    if lost:
        yield (
            f"Warning: {name_list(lost, _MAX_NAMED)} cannot return after the power-off, because no "
            "charger charges them. Add charger, raise battery.capacity, or add charge to the scenario."
        )


def _within(time: float | None, limit: float) -> bool:
    return time is not None and time < math.inf and time <= limit


def _charged(topology: Topology) -> Iterator[str]:
    by_group = scenario.devices_by_group(topology.devices)
    for entry in topology.scenario:
        if entry.acts_on_battery and entry.verb != "unplug":
            yield from scenario.expand(entry.targets, by_group)


def _battery(device: PlannedDevice) -> BatteryConfig | None:
    return None if device.energy is None else device.energy.battery


NUMBERS: Mapping[str, FleetNumber] = {
    "battery.capacity": (
        lambda _, device: None if (one := _battery(device)) is None else one.capacity,
        lambda value: f"{value / 3600:.3g}Wh",
    ),
    "battery.initial": (
        lambda _, device: None if (one := _battery(device)) is None else one.initial,
        lambda value: f"{value:.0%}",
    ),
}


def has_charger(device: PlannedDevice) -> bool:
    return device.energy is not None and device.energy.charger is not None


def init_settings(device: PlannedDevice) -> dict[str, Any]:
    """Let the init count the device's energy."""
    return {} if device.energy is None else {"energy": device.energy, "cpu": device.cpu}


def entry(device: PlannedDevice) -> dict[str, Any] | None:
    """Leave out the charger's settings, except whether there is one: its trace may be long."""
    if (config := device.energy) is None:
        return None
    return {**asdict(replace(config, charger=None)), "charger": config.charger is not None}

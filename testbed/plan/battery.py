"""Expected power of the planned devices, and how long their batteries last.

There are two estimates for each device: without any work, and if it trains round after round without
waiting for a model. A run is between the two. The battery is computed with the same account as in a run
(`agents.energy.account`), at constant power, with the charger of the topology.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agents.energy.account import EnergyAccount
from agents.energy.amounts import microwatts
from agents.energy.settings import EnergyConfig
from agents.texts import name_list
from agents.timing.nanoseconds import Nanoseconds, to_seconds
from testbed.plan.planned_devices import Plan, PlannedDevice
from testbed.topology import Topology, scenario

if TYPE_CHECKING:
    from testbed.plan.rounds import Round

_MAX_NAMED = 4
_MAX_STEPS = 20_000
"""Changes of the charger's power to look at for one estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatteryLife:
    """Times are device times in seconds from the start of the run. They are infinite if the battery does
    not get too low, and if a changing charger was looked at for as long as possible without a
    power-off."""

    idle_power: float
    """Watts without work."""
    working_power: float | None
    """Mean watts while the device trains round after round; None if its round is unknown."""
    idle: float | None
    """Time of the first power-off without work; None without a battery."""
    working: float | None
    """Time of the first power-off if the device trains round after round; None also if the power is
    unknown."""
    returns: bool
    """Whether the charger charges the device again after a power-off. True without a battery."""


def lives(plan: Plan, rounds: Mapping[str, Round]) -> dict[str, BatteryLife]:
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
        idle_power=energy.idle,
        working_power=None if work is None else energy.idle + work,
        idle=None if energy.battery is None else idle,
        working=None if energy.battery is None else working,
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


def device_columns(found: Mapping[str, BatteryLife]) -> dict[str, dict[str, Any]]:
    """For programs: powers in watts, times in seconds."""
    return {
        name: {
            "idle_w": one.idle_power,
            "working_w": one.working_power,
            "battery_idle_s": one.idle,
            "battery_working_s": one.working,
        }
        for name, one in found.items()
    }


def group_columns(found: Mapping[str, BatteryLife], names: Sequence[str]) -> dict[str, str | None]:
    """For people: `power` (idle to working), `battery idle` and `battery working`. Columns that no
    device of the plan has are left out."""
    if not found:
        return {}
    own = [found[name] for name in names if name in found]
    powers = [one.idle_power for one in own]
    powers += [one.working_power for one in own if one.working_power is not None]
    columns = {"power": _span(powers, _watts)}
    if any(one.idle is not None for one in found.values()):
        columns["battery idle"] = _span([one.idle for one in own], time_text)
        columns["battery working"] = _span([one.working for one in own], time_text)
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
    found = lives(plan, rounds)
    end = topology.stop.build().after
    limit = math.inf if end is None else end
    until = "" if end is None else f", before the run ends after {time_text(end)} (stop.after)"
    idle = [name for name, one in found.items() if _within(one.idle, limit)]
    working = [name for name, one in found.items() if _within(one.working, limit) and name not in idle]
    for names, times, how in (
        (idle, [found[name].idle for name in idle], "even without work"),
        (working, [found[name].working for name in working], "if they train round after round"),
    ):
        if names:
            listed, after = name_list(names, _MAX_NAMED), _span(times, time_text)
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

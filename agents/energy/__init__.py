"""Energy of a device: its power settings, its battery and charger, and the exact account of them. No I/O
and no clock."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from agents.energy.messages import Charge, SetBattery, Unplug
from agents.timing.nanoseconds import Nanoseconds, from_seconds

Microwatts = int
Femtojoules = int

MICROWATTS_PER_WATT = 10**6
FEMTOJOULES_PER_JOULE = 10**15
BYTES_PER_MB = 10**6


def microwatts(watts: float) -> Microwatts:
    """Convert `watts` to the nearest microwatt."""
    return round(Fraction(repr(float(watts))) * MICROWATTS_PER_WATT)


def femtojoules(joules: float) -> Femtojoules:
    """Convert `joules` to the nearest femtojoule."""
    return round(Fraction(repr(float(joules))) * FEMTOJOULES_PER_JOULE)


def femtojoules_per_byte(joules_per_mb: float) -> Femtojoules:
    """Convert joules per MB (10^6 bytes) to the nearest femtojoule per byte."""
    return round(Fraction(repr(float(joules_per_mb))) * FEMTOJOULES_PER_JOULE / BYTES_PER_MB)


def to_watts(power: Microwatts) -> float:
    return power / MICROWATTS_PER_WATT


def to_joules(energy: Femtojoules) -> float:
    return energy / FEMTOJOULES_PER_JOULE


@dataclass(frozen=True, slots=True, kw_only=True)
class BatteryConfig:
    """Levels are shares of the capacity, from 0 to 1."""

    capacity: float
    """Joules of the full battery."""
    initial: float = 1.0
    """Level at the start of the run."""
    power_off_at: float = 0.0
    """Level at or below which the device powers off."""
    return_at: float = 0.1
    """Level at or above which a device that has powered off starts again. It is above `power_off_at`."""
    loses_memory: bool = False
    """A power-off erases the vectors that the client keeps on its disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChargerConfig:
    """Each power holds from its time to the next."""

    times: Sequence[float]
    """Seconds in increasing order; the first is 0."""
    watts: Sequence[float]
    """Power in watts from each of `times` on."""
    period: float | None = None
    """Seconds after which the powers repeat; None if the last one holds for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyConfig:
    idle: float
    """Watts while the device is on, whatever else it does."""
    busy: float
    """Watts beside `idle` while the whole CPU share of the device is in use; half of it for half of the
    share."""
    sent: float = 0.0
    """Joules per MB (10^6 bytes) over the device's link."""
    received: float = 0.0
    """Joules per MB (10^6 bytes) over the device's link."""
    battery: BatteryConfig | None = None
    """None for mains power."""
    charger: ChargerConfig | None = None
    """Plugged in at the start of the run."""

    @property
    def counts_bytes(self) -> bool:
        """Bytes that the device sends or receives need energy."""
        return self.sent > 0 or self.received > 0

    def transfer(self, *, sent: float, received: float) -> float:
        """Joules for these bytes."""
        return (self.sent * sent + self.received * received) / BYTES_PER_MB


class Charger:
    """Piecewise constant. Times are nanoseconds of device time since the start of the run clock."""

    __slots__ = ("_powers", "_times", "period")

    def __init__(self, config: ChargerConfig) -> None:
        self._times = [from_seconds(at) for at in config.times]
        self._powers = [microwatts(watts) for watts in config.watts]
        self.period = None if config.period is None else from_seconds(config.period)
        """Nanoseconds after which the powers repeat; None if they do not repeat."""

    @classmethod
    def constant(cls, watts: float) -> Charger:
        return cls(ChargerConfig(times=[0.0], watts=[watts]))

    def power(self, at: Nanoseconds) -> tuple[Microwatts, Nanoseconds | None]:
        """Power at `at`, and the time until which it stays; None if for ever."""
        begin = 0 if self.period is None else at // self.period * self.period
        index = bisect.bisect_right(self._times, at - begin) - 1
        if index + 1 < len(self._times):
            return self._powers[index], begin + self._times[index + 1]
        return self._powers[index], None if self.period is None else begin + self.period

    @property
    def has_power(self) -> bool:
        return any(self._powers)


# Exact account of a device's energy: consumption, battery level, and the time of the next power-off or
# return.
#
# The account is advanced along device time, in whole nanoseconds. All sums are whole femtojoules, so
# that they are exact: stored = initial + supplied − consumed + set, with the energy at the start, and
# the changes by `set_level`.


class Outlook(NamedTuple):
    """Next event of a battery while the power draw stays the same."""

    at: Nanoseconds
    """Device time."""
    switches: bool
    """The device powers off or returns at `at`; else the charger's power changes."""


class EnergyAccount:
    """`cpu`: planned CPU share in host cores of device time, to which `EnergyConfig.busy` refers, if
    any. `at`: device time at which the account begins. The owner calls `advance` with the work since the
    last call. Then, if `must_switch`, it powers the device off or on, and calls `switch`."""

    def __init__(self, config: EnergyConfig, cpu: float | None = None, at: Nanoseconds = 0) -> None:
        self.at = at
        """Device time up to which the account has counted."""
        self.idle: Microwatts = microwatts(config.idle)
        """While the device is on, without work."""
        self.busy: Microwatts = microwatts(config.busy)
        """Additional power while the whole CPU share is in use."""
        self._per_core: Microwatts = round(self.busy / cpu) if cpu else self.busy
        self._sent = femtojoules_per_byte(config.sent)
        self._received = femtojoules_per_byte(config.received)
        self.consumed: Femtojoules = 0
        """Includes `transferred`."""
        self.transferred: Femtojoules = 0
        """Energy that the device has consumed to send and receive bytes."""
        self.supplied: Femtojoules = 0
        """Energy from the charger that the device has consumed or stored. 0 without a battery."""
        self.is_on = True
        self.is_counted = True
        """The device takes part in the run. While it is absent, it neither consumes energy nor
        charges."""
        battery = config.battery or BatteryConfig(capacity=0.0)
        self.has_battery = config.battery is not None
        self.capacity: Femtojoules = femtojoules(battery.capacity)
        """Full battery; 0 without one."""
        self.stored: Femtojoules = self._energy_at(battery.initial)
        """Energy in the battery. It may be slightly below 0 if the consumption is known only after the
        fact. 0 without a battery."""
        self._power_off_at = self._energy_at(battery.power_off_at)
        self._return_at = self._energy_at(battery.return_at)
        self.loses_memory = battery.loses_memory
        """A power-off erases the vectors that the client keeps on its disk."""
        self._own_charger = None if config.charger is None else Charger(config.charger)
        self._charger = self._own_charger
        """Plugged in."""

    def _energy_at(self, level: float) -> Femtojoules:
        return femtojoules(level) * self.capacity // femtojoules(1.0)

    # Consumption

    def advance(self, to: Nanoseconds, work: Femtojoules = 0) -> None:
        """To device time `to`. `work`: of the CPU since `at`, beside the idle power, spread evenly."""
        begin, elapsed = self.at, to - self.at
        if not self.is_counted:
            self.at = max(to, begin)
            return
        idle = self.idle if self.is_on else 0
        if elapsed <= 0:
            self._flow(work, 0)
            return
        if not self.has_battery:
            self._flow(idle * elapsed + work, 0)
            self.at = to
            return
        while self.at < to:
            power, until = self._supply()
            end = to if until is None else min(to, until)
            part = work * (end - begin) // elapsed - work * (self.at - begin) // elapsed
            self._flow(idle * (end - self.at) + part, power * (end - self.at))
            self.at = end

    def transfer(self, *, sent: int = 0, received: int = 0) -> Femtojoules:
        """Consume the energy for these bytes at once, and return it. An absent device consumes
        nothing."""
        if not self.is_counted:
            return 0
        energy = self._sent * sent + self._received * received
        self.transferred += energy
        self._flow(energy, 0)
        return energy

    def work_of_cpu(self, cpu: Nanoseconds) -> Femtojoules:
        """Energy of CPU time of one host core, as the kernel counts it."""
        return self._per_core * cpu

    def _flow(self, consumed: Femtojoules, offered: Femtojoules) -> None:
        """A full battery takes no more from the charger than is consumed."""
        self.consumed += consumed
        if self.has_battery:
            stored = min(self.capacity, self.stored + offered - consumed)
            self.supplied += stored - self.stored + consumed
            self.stored = stored

    # Battery

    @property
    def level(self) -> float | None:
        """Level of the battery, from 0 to 1; None without a battery."""
        return max(0, self.stored) / self.capacity if self.has_battery else None

    @property
    def must_switch(self) -> bool:
        """The device must power off now, or, if it is off, can start again now."""
        if not self.has_battery or not self.is_counted:
            return False
        return self.stored <= self._power_off_at if self.is_on else self.stored >= self._return_at

    def switch(self) -> None:
        """Power the device off if it is on, and on if it is off."""
        self.is_on = not self.is_on

    def set_level(self, level: float) -> None:
        """Share of the capacity."""
        if self.has_battery:
            self.stored = self._energy_at(level)

    def charge(self, watts: float | None = None) -> None:
        """Constant power, or the device's own charger if `watts` is None."""
        self._charger = self._own_charger if watts is None else Charger.constant(watts)

    def unplug(self) -> None:
        self._charger = None

    def act(self, action: SetBattery | Charge | Unplug) -> None:
        match action:
            case SetBattery(level):
                self.set_level(level)
            case Charge(watts):
                self.charge(watts)
            case Unplug():
                self.unplug()

    @property
    def charging_power(self) -> Microwatts:
        """Offered by the charger now."""
        return self._supply()[0]

    def _supply(self) -> tuple[Microwatts, Nanoseconds | None]:
        return (0, None) if self._charger is None else self._charger.power(self.at)

    def outlook(self, work: Microwatts = 0) -> Outlook | None:
        """Next event if the CPU's work draws `work` from now on, beside the idle power; None if there is
        never one. A switch is at the first nanosecond at which the threshold is reached."""
        if not self.has_battery or not self.is_counted:
            return None
        if self.must_switch:
            return Outlook(self.at, switches=True)
        power, until = self._supply()
        net = power - (self.idle + work if self.is_on else 0)
        distance = (self._power_off_at if self.is_on else self._return_at) - self.stored
        if distance * net > 0:
            at = self.at - -abs(distance) // abs(net)
            if until is None or at <= until:
                return Outlook(at, switches=True)
        return None if until is None else Outlook(until, switches=False)

    def switches_eventually(self, work: Microwatts = 0) -> bool:
        """The device ever powers off or returns if the CPU's work always draws `work`."""
        if not self.has_battery or not self.is_counted:
            return False
        if not self.is_on and not self.must_switch:
            return self._charges_again()
        probe = copy.copy(self)
        period = None if self._charger is None else self._charger.period
        begin: Femtojoules | None = None
        filled = False
        while (ahead := probe.outlook(work)) is not None:
            if ahead.switches:
                return True
            probe.advance(ahead.at, work * (ahead.at - probe.at))
            filled = filled or probe.stored == self.capacity
            if period is not None and probe.at % period == 0:
                # One whole period later. The level at the end of a period rises with the level at its
                # start. So if the level has not fallen, it will not be lower in any later period. If it
                # has fallen and the battery was never full, it falls by as much in each later period.
                if begin is not None and probe.stored >= begin:
                    return False
                if begin is not None and not filled:
                    return True
                begin, filled = probe.stored, False
        return False

    def _charges_again(self) -> bool:
        """The charger has power now or later."""
        if self._charger is None:
            return False
        if self._charger.period is not None:
            return self._charger.has_power
        at: Nanoseconds | None = self.at
        while at is not None:
            power, at = self._charger.power(at)
            if power:
                return True
        return False

"""Keys `power` and `energy` of a device group and of a device profile: power draw, battery and
charger."""

from __future__ import annotations

import bisect
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, model_validator

from agents.disk import files
from agents.energy import BatteryConfig, ChargerConfig, EnergyConfig
from testbed.topology import units
from testbed.topology.fields import (
    Count,
    FilePath,
    Joules,
    JoulesPerMegabyte,
    Model,
    Seconds,
    Share,
    Watts,
    optional,
)

if TYPE_CHECKING:  # it imports this module
    from testbed.topology.schema import Topology

DAY_S = 86_400.0
_RETURN_ABOVE = 0.1
"""Difference between the level of the return and the level of the power-off."""
_MAX_BYTES = 64 * 2**20
_LIMITS = {"time": (1e9, "seconds"), "watts": (1e9, "watts")}
"""Maximum value and unit of each column."""
_EMPTY = "is empty, a gap in the trace: fill it in"
_EXPECTED_HEADER = "expected the columns time (s) and watts"


class BatterySettings(Model):
    """Battery of each device of the group. Levels are shares of its capacity."""

    capacity: Joules | None = optional(
        "Energy of the full battery, such as 18Wh. Default: that of the profile"
    )
    initial: Share = optional("Level at the start of the run", 1.0)
    power_off_at: Share = optional(
        "Level at which the device powers off without warning, as in a crash", 0.0
    )
    return_at: Share | None = optional(
        "Level at which a device that has powered off starts again, if a charger charges it. Default: "
        "10 percentage points above power_off_at, at most 100%"
    )
    loses_memory: bool = optional(
        "Whether a power-off erases what the client keeps on its disk: the vectors of its rule. false: "
        "the device finds them again when it returns",
        default=False,
    )

    @model_validator(mode="after")
    def _thresholds_in_order(self) -> Self:
        if self.power_off_at >= 1:
            raise ValueError("power_off_at is 100%, expected a lower level such as 5%")
        if self.return_at is not None and self.return_at <= self.power_off_at:
            raise ValueError(
                f"return_at is {self.return_at:.4g}, expected more than power_off_at, which is "
                f"{self.power_off_at:.4g}: raise return_at, or lower power_off_at"
            )
        return self

    def plain(self, capacity: float) -> BatteryConfig:
        """`capacity`: joules of the full battery."""
        return_at = self.return_at
        if return_at is None:
            return_at = min(1.0, round(self.power_off_at + _RETURN_ABOVE, 12))
        return BatteryConfig(
            capacity=capacity,
            initial=self.initial,
            power_off_at=self.power_off_at,
            return_at=return_at,
            loses_memory=self.loses_memory,
        )


def _moment(value: Any) -> Any:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError("expected a time of day and a power, such as [22h, 10W]")
    return tuple(value)


DailyPower = Annotated[tuple[Seconds, Watts], BeforeValidator(_moment)]


class ChargerSettings(Model):
    """Charger of each device of the group. Needs exactly one of watts, schedule and trace."""

    watts: Watts | None = optional("Constant power, such as 10W")
    schedule: tuple[DailyPower, ...] | None = optional(
        "Power during each day: a list of [time of day, power], such as [[22h, 10W], [6h, 0W]]. A power "
        "holds until the next time"
    )
    clock: Seconds | None = optional(
        "With schedule: time of day at the start of the run, such as 20h. Default: 0h, midnight"
    )
    trace: FilePath | None = optional(
        "CSV file with the columns time (s) and watts, such as the power of a solar panel. A row holds "
        "until the next row; the first row is at time 0"
    )
    loop: bool = optional("Whether trace repeats. false: the power of its last row stays", default=True)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        forms = [name for name in ("watts", "schedule", "trace") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise ValueError(
                f"found {' and '.join(forms) or 'none of watts, schedule and trace'}, expected exactly "
                "one of watts, schedule and trace such as watts: 10W"
            )
        if self.clock is not None and self.schedule is None:
            raise ValueError("clock needs schedule: add schedule, or remove clock")
        if not self.loop and self.trace is None:
            raise ValueError("loop needs trace: add trace, or remove loop")
        if self.clock is not None and self.clock >= DAY_S:
            raise ValueError(f"clock is {self.clock / 3600:g} h, expected a time of day below 24h")
        if self.schedule is not None:
            self._check_schedule(self.schedule)
        return self

    @staticmethod
    def _check_schedule(schedule: tuple[tuple[float, float], ...]) -> None:
        if not schedule:
            raise ValueError("schedule is empty, expected at least one entry such as [22h, 10W]")
        times = [at for at, _ in schedule]
        for at in times:
            if at >= DAY_S:
                raise ValueError(f"schedule has {at / 3600:g} h, expected times of day below 24h")
        if len(set(times)) < len(times):
            twice = next(at for at in times if times.count(at) > 1)
            raise ValueError(f"schedule has {twice / 3600:g} h twice, expected different times of day")
        descents = sum(after < before for before, after in itertools.pairwise([*times, times[0]]))
        if descents > 1:  # one is allowed: the list may begin in the evening
            raise ValueError(
                "schedule has times out of order, expected those of one day in order such as "
                "[[22h, 10W], [6h, 0W]]"
            )

    def plain(self, trace: ChargerConfig | None) -> ChargerConfig:
        """`trace`: content of the file `trace`, if there is one."""
        if self.watts is not None:
            return ChargerConfig(times=[0.0], watts=[self.watts])
        if self.schedule is not None:
            return _daily(sorted(self.schedule), self.clock or 0.0)
        if trace is None:
            raise ValueError(f"the trace {self.trace} was not read")
        return trace


def _daily(schedule: list[tuple[float, float]], clock: float) -> ChargerConfig:
    """`clock`: time of day in seconds at the start of the run."""
    times = [at for at, _ in schedule]
    first = bisect.bisect_right(times, clock)
    moved = [(at - clock, watts) for at, watts in schedule[first:]]
    moved += [(at - clock + DAY_S, watts) for at, watts in schedule[:first]]
    if moved[-1][0] == DAY_S:
        del moved[-1]
    entries = [(0.0, schedule[first - 1][1]), *moved]  # the power from the evening before, too
    return ChargerConfig(
        times=[at for at, _ in entries], watts=[watts for _, watts in entries], period=DAY_S
    )


def _charger(value: Any) -> Any:
    return {"watts": value} if isinstance(value, str) else value


class PowerFigures(Model):
    """Power draw of a type of device. A key without a value is unknown."""

    idle: Watts | None = optional("Power while the device is on, without work")
    core: Watts | None = optional("Power that each busy core adds to idle")
    sent: JoulesPerMegabyte | None = optional("Energy per MB sent over the link, such as 5J/MB")
    received: JoulesPerMegabyte | None = optional("Energy per MB received over the link, such as 5J/MB")
    capacity: Joules | None = optional("Energy of the device's full battery, such as 18Wh")


class Power(Model):
    """Power draw of a device in each state, for an estimate of its energy. A state without a value
    counts as 0 W."""

    download: Watts | None = optional("While it receives a model")
    train: Watts | None = optional("While it trains")
    upload: Watts | None = optional("While it sends an update")
    wait: Watts | None = optional("While it waits for a model")
    paused: Watts | None = optional("While it is paused")
    offline: Watts | None = optional("While it is crashed, absent or disconnected")

    def plain(self) -> dict[str, float]:
        """Watts by state."""
        return {state: watts for state, watts in self if watts is not None}


class EnergySettings(Model):
    """Energy of each device of the group. Keys that are left out have the value of the profile."""

    idle: Watts | None = optional(
        "Power while the device is on, whatever else it does. Default: that of the profile"
    )
    core: Watts | None = optional(
        "Power that each busy core of the device adds. Default: that of the profile"
    )
    cores: Count | None = optional(
        "Number of the device's cores, which are all busy when its whole CPU share is in use. Default: "
        "that of the profile; without a profile cpu, rounded up, and at least 1"
    )
    sent: JoulesPerMegabyte | None = optional(
        "Energy per MB sent over the link. Default: that of the profile, or 0"
    )
    received: JoulesPerMegabyte | None = optional(
        "Energy per MB received over the link. Default: that of the profile, or 0"
    )
    battery: BatterySettings | None = optional(
        "Battery. Default: none, the device has mains power and never powers off"
    )
    charger: Annotated[
        ChargerSettings | None,
        BeforeValidator(_charger, json_schema_input_type=str | ChargerSettings | None),
    ] = optional(
        "Charger of the battery, plugged in at the start. A power is short for a constant charger: 10W "
        "for {watts: 10W}. Default: none"
    )

    @model_validator(mode="after")
    def _charger_has_battery(self) -> Self:
        if self.charger is not None and self.battery is None:
            raise ValueError("charger has no effect without a battery: add battery, or remove charger")
        return self

    def missing(self, profile: PowerFigures | None) -> list[str]:
        """Return the needed keys that neither the group nor `profile` gives."""
        needed = [name for name in ("idle", "core") if self._figure(name, profile) is None]
        if self.battery is not None and self._capacity(profile) is None:
            needed.append("battery.capacity")
        return needed

    def plain(
        self, profile: PowerFigures | None, cores: int, trace: ChargerConfig | None
    ) -> EnergyConfig:
        """`cores`: if the group gives none. `trace`: content of the charger's trace file, if there is
        one."""
        capacity = self._capacity(profile)
        return EnergyConfig(
            idle=self._figure("idle", profile) or 0.0,
            busy=(self._figure("core", profile) or 0.0) * (self.cores or cores),
            sent=self._figure("sent", profile) or 0.0,
            received=self._figure("received", profile) or 0.0,
            battery=None if self.battery is None else self.battery.plain(capacity or 0.0),
            charger=None if self.charger is None else self.charger.plain(trace),
        )

    def _figure(self, name: str, profile: PowerFigures | None) -> float | None:
        own: float | None = getattr(self, name)
        if own is None and profile is not None:
            own = getattr(profile, name)
        return own

    def _capacity(self, profile: PowerFigures | None) -> float | None:
        own = None if self.battery is None else self.battery.capacity
        return profile.capacity if own is None and profile is not None else own


def energy_settings(value: Any) -> Any:
    """`true` stands for the figures of the profile."""
    if isinstance(value, bool):
        return EnergySettings() if value else None
    if value is not None and not isinstance(value, dict | EnergySettings):
        raise ValueError("expected true, or settings such as {idle: 2W, core: 1.5W}")
    return value


def twin_remark(topology: Topology) -> str | None:
    if any(group.energy is not None for group in topology.devices):
        return "energy is not counted: the twin has no figures of its devices for it"
    return None


LONG_FIGURES = ("energy",)


class EnergyProfileKeys(Model):
    power: Power | None = optional("Power draw of the whole device, by state")
    energy: PowerFigures | None = optional("Figures for the key energy of a topology")


class EnergyKeys(Model):
    power: Power | None = optional("Power draw of a device in each state. Default: that of the profile")
    energy: Annotated[
        EnergySettings | None,
        BeforeValidator(energy_settings, json_schema_input_type=bool | EnergySettings | None),
    ] = optional(
        "Account of the energy that a device consumes during the run, with battery and charger. true: "
        "with the figures of the profile. Default: none",
        hidden=True,
    )


def read_trace(charger: ChargerSettings, folder: Path) -> ChargerConfig:
    """The file's path is relative to `folder`. Raises OSError, and ValueError that names file and
    line."""
    path = folder / (charger.trace or "")
    try:
        text = files.read(path, _MAX_BYTES).decode("utf-8-sig")
        return read_csv(io.StringIO(text, newline=None), loop=charger.loop)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_csv(lines: Iterable[str], *, loop: bool) -> ChargerConfig:
    """The format is that of `testbed.topology.units`. Raises ValueError with the line number."""
    table = units.read_timed_csv(lines, _LIMITS, _check_header, _EMPTY)
    times, watts = table.times.tolist(), table.columns["watts"].tolist()
    for line, reason in _gaps(table.lines, times, watts):
        raise ValueError(f"line {line}: {reason}")
    return ChargerConfig(times=times, watts=watts, period=table.period(loop=loop))


def _check_header(cells: list[str]) -> list[str]:
    if sorted(cells) != ["time", "watts"]:
        raise ValueError(f"found the columns {', '.join(cells)!r:.80}, {_EXPECTED_HEADER}")
    return cells


def _gaps(numbers: Sequence[int], times: list[float], watts: list[float]) -> Iterator[tuple[int, str]]:
    """Yield line number and description.

    A trace whose rows mostly have the same distance was sampled at regular times. There, a larger
    distance is a gap, unless the power before it is 0, as at night. In other traces each row is a
    change, and there are no gaps.
    """
    steps = [after - before for before, after in itertools.pairwise(times)]
    if len(steps) < 4:
        return
    usual = sorted(steps)[len(steps) // 2]
    regular = sum(math.isclose(step, usual, rel_tol=0.01) for step in steps)
    if regular < 0.9 * len(steps):
        return
    for index, step in enumerate(steps):
        if step > 1.5 * usual and watts[index]:
            yield (
                numbers[index + 1],
                f"time is {times[index + 1]:g}, {step:g} s after the row before it, but the rows of "
                f"this trace are {usual:g} s apart: a gap. Add the missing rows, or a row with 0 watts",
            )

"""Energy in the init of a device: in real time, by the counters of the kernel. No I/O and no clock."""

from __future__ import annotations

import math

from agents.config import FeatureSettings
from agents.device.part import ClientHost, CounterReading, InitHalf
from agents.energy import EnergyAccount, EnergyConfig, femtojoules, to_joules, to_watts
from agents.energy.messages import (
    MAX_WATTS,
    Charge,
    EnergyFigures,
    EnergySample,
    EnergyStart,
    PowerSwitch,
    SetBattery,
    Unplug,
)
from agents.fields import FeatureAction
from agents.timing.nanoseconds import SECOND, Nanoseconds, from_seconds, to_seconds
from agents.wire.messages import Message

STEP: Nanoseconds = SECOND // 20
"""Shortest time between two looks at the counters, on the host's clock. A device powers off at most this
much later than its battery reaches the threshold."""
_EARLIER: Nanoseconds = 30 * SECOND
"""Readings from before the start of the run clock are kept up to this age."""
_METER_SECONDS = 0.1
"""Seconds between two readings before the run clock is known to run. The use of at most this much of the
CPU time around its start is attributed wrongly."""


def make_half(device: FeatureSettings, host: ClientHost) -> EnergyInit | None:
    if device.energy is None:
        return None
    return EnergyInit(host, device.energy, device.cpu, device.dilation, is_present=device.present)


class EnergyMeter:
    """`cpu`: share in host cores of device time, to which `config.busy` refers. `dilation`: host seconds
    per second of device time. `is_present`: the device takes part in the run from the start.

    Consumption is counted from the start of the run clock, of which `start` tells. Earlier readings show
    how much of the counters is older than that.
    """

    def __init__(
        self,
        device: str,
        config: EnergyConfig,
        cpu: float | None,
        dilation: float = 1.0,
        *,
        is_present: bool = True,
    ) -> None:
        self._device = device
        self._dilation = dilation
        self.account = EnergyAccount(config, cpu)
        self.account.is_counted = is_present
        self._epoch: Nanoseconds | None = None
        """The host's clock at device time 0, once that is known."""
        self._earlier: list[CounterReading] = []
        """Readings from before the run clock was known to run."""
        self._last: CounterReading | None = None
        """Reading up to which the account has counted."""
        self._reported_on = True
        """Power at the last call of `switch`."""
        self._sampled = 0, 0
        """Device time in nanoseconds and consumed femtojoules at the last sample."""

    @property
    def is_counting(self) -> bool:
        return self._epoch is not None

    def start(self, order: EnergyStart) -> None:
        """Begin to count at device time `order.at`. A second call only moves the zero of the device
        time, as after a restart of the aggregator, for which the run clock stands still."""
        counting, self._epoch = self.is_counting, from_seconds(order.epoch)
        if counting:
            return
        account = self.account
        account.at = from_seconds(order.at)
        if (before := order.energy) is not None:
            account.consumed = femtojoules(before.consumed)
            account.transferred = femtojoules(before.transferred)
            account.supplied = femtojoules(before.supplied or 0.0)
            account.is_on = before.is_on
            if before.level is not None:
                account.set_level(before.level)
        self._sampled = account.at, account.consumed
        begin = self._epoch + round(account.at * self._dilation)
        old = [reading for reading in self._earlier if reading.at <= begin]
        self._last = next(reversed(old), next(iter(self._earlier), None))
        self._earlier.clear()

    def update(self, reading: CounterReading, *, is_starting: bool = False) -> None:
        """`is_starting`: the client has been starting since the last call, without a CPU limit. Its CPU
        time then says nothing of the device, whose whole CPU share counts as busy instead."""
        if self._epoch is None:
            oldest = reading.at - _EARLIER
            self._earlier = [one for one in self._earlier if one.at >= oldest] + [reading]
            return
        last, self._last = self._last or reading, reading
        account = self.account
        is_active = account.is_on and account.is_counted
        now = self._device_time(reading.at)
        work = account.work_of_cpu(max(0, reading.cpu - last.cpu))
        if is_starting:
            work = account.busy * max(0, now - account.at)
        account.advance(now, work if is_active else 0)
        if is_active:
            account.transfer(
                sent=max(0, reading.sent - last.sent),
                received=max(0, reading.received - last.received),
            )

    def switch(self) -> bool | None:
        """Power off or on if the battery requires it. Return whether the device has power; None if that
        is as at the last call."""
        if self.is_counting and self.account.must_switch:
            self.account.switch()
        if self.account.is_on == self._reported_on:
            return None
        self._reported_on = self.account.is_on
        return self.account.is_on

    def next_look(self, now: Nanoseconds) -> float:
        """Earliest time on the host's clock at which the device may power off or return, in nanoseconds,
        but at least `STEP` after `now`; infinite if it cannot."""
        if self._epoch is None or (ahead := self.account.outlook(self.account.busy)) is None:
            return math.inf
        return max(now + STEP, self._epoch + round(ahead.at * self._dilation))

    def sample(self, at: float) -> EnergySample:
        """Up to the last update. `at`: seconds on the aggregator's monotonic clock."""
        account = self.account
        since, consumed = self._sampled
        self._sampled = account.at, account.consumed
        elapsed = to_seconds(account.at - since)
        power = to_joules(account.consumed - consumed) / elapsed if elapsed > 0 else 0.0
        figures = figures_of(account, min(power, MAX_WATTS))  # many bytes may be counted in a moment
        return EnergySample(self._device, at, figures)

    def _device_time(self, at: Nanoseconds) -> Nanoseconds:
        return round((at - (self._epoch or 0)) / self._dilation)


def figures_of(account: EnergyAccount, power: float) -> EnergyFigures:
    """`power`: watts, mean since the last sample."""
    battery = account.has_battery
    return EnergyFigures(
        consumed=to_joules(account.consumed),
        transferred=to_joules(account.transferred),
        power=power,
        is_on=account.is_on,
        level=account.level,
        supplied=to_joules(account.supplied) if battery else None,
        charging=to_watts(account.charging_power) if battery else None,
    )


class EnergyInit(InitHalf):
    """Arguments: as of EnergyMeter."""

    def __init__(
        self,
        host: ClientHost,
        config: EnergyConfig,
        cpu: float | None,
        dilation: float = 1.0,
        *,
        is_present: bool = True,
    ) -> None:
        self._host = host
        self._meter = EnergyMeter(host.device, config, cpu, dilation, is_present=is_present)
        self._was_starting = False
        """A client was starting at the last look."""

    @property
    def allows_client(self) -> bool:
        return self._meter.account.is_on

    def look(self) -> float:
        """If the battery is empty, power off and report it. If an empty battery is charged, report that;
        the controller then orders the start, because it first has to lift the CPU limit."""
        meter, host = self._meter, self._host
        reading = host.counters()
        was_starting, self._was_starting = self._was_starting, host.is_starting
        meter.update(reading, is_starting=was_starting or self._was_starting)
        if (powered := meter.switch()) is not None:
            if not powered:
                host.power_off(loses_memory=meter.account.loses_memory)
            self.sample()
            level = meter.account.level or 0.0
            host.publish(PowerSwitch(host.device, host.now(), powered=powered, level=level))
        if not meter.is_counting:
            return _METER_SECONDS
        return (meter.next_look(reading.at) - reading.at) / SECOND

    def sample(self) -> None:
        if self._meter.is_counting:
            self._host.publish(self._meter.sample(self._host.now()), is_lossy=True)

    def obey(self, order: Message) -> bool:
        if not isinstance(order, EnergyStart):
            return False
        self._meter.start(order)
        return True

    def act(self, action: FeatureAction) -> bool:
        if not isinstance(action, SetBattery | Charge | Unplug):
            return False
        self.look()
        self._meter.account.act(action)
        return True

    def set_present(self, *, is_present: bool) -> None:
        """An absent device consumes nothing."""
        self.look()
        self._meter.account.is_counted = is_present

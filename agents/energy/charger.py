"""Power of a charger over time."""

from __future__ import annotations

import bisect

from agents.energy.amounts import Microwatts, microwatts
from agents.energy.settings import ChargerConfig
from agents.timing.nanoseconds import Nanoseconds, from_seconds


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

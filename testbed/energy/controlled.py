"""Energy in the controller of a run: energy of the rounds, power-offs and returns, and the host's own
energy beside.

The energy of a round is computed from the devices' energy samples and the records of the aggregator.
It has three parts: the bytes of the model, everything else that the device consumed during the training,
and the bytes of the update. Samples come about once a second. Between two samples the power counts as
constant.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from agents import events
from agents.device_actions import Action, PowerOff, PowerOn
from agents.energy import EnergyConfig
from agents.energy.messages import (
    Charge,
    EnergyFigures,
    EnergyOrder,
    EnergySample,
    EnergyStart,
    PowerSwitch,
    RoundEnergy,
    SetBattery,
    Unplug,
)
from agents.mqtt.topics import AGGREGATOR
from agents.wire.messages import Message, MessageError
from testbed.errors import BadInputError
from testbed.fidelity.figures import rounded
from testbed.fidelity.part import FeatureFigures
from testbed.host import cpus
from testbed.plan import Plan
from testbed.plan.agent_configs import model_bytes
from testbed.run.inputs import Act, Obey
from testbed.run.part import ControlledRun, ControllerPart
from testbed.rundir.live_files import Samples


class ControlledEnergy(ControllerPart):
    """Nothing happens if no device of the run counts its energy."""

    def __init__(self, run: ControlledRun) -> None:
        super().__init__(run)
        is_counted = any(device.energy is not None for device in run.plan.devices)
        self._rounds = RoundEnergies(run.plan, model_bytes(run.spec.topology) if is_counted else 0)
        self._earlier: dict[str, EnergyFigures] = {}
        """Figures of each device at the end of the run's earlier legs."""
        self._host = cpus.rapl_meter() if is_counted else None
        """Meter of the host; None if it has no readable counters, or nothing is to be counted."""
        self._host_joules: float | None = None
        """Energy of the host since the last start of the run clock; None if not measured."""
        self._host_joules_before = 0.0

    def resume(self, past: Sequence[events.Record], samples: Samples) -> None:
        found = [*energy_samples(samples)] if self._rounds.devices else []
        self._rounds.resume(past, found, samples.zero or 0.0)
        self._earlier = {one.device: one.energy for one in found}

    def start(self, begin: float, at: float) -> None:
        if (joules := self._read_host()) is not None:
            self._host_joules_before = joules
        if self._run.epoch is not None:
            for order in self._rounds.start(self._run.epoch, begin, self._earlier):
                self._run.do(Obey(order))

    def record(self, record: events.Record, at: float) -> None:
        self._rounds.record(record)

    def message(self, message: Message, at: float) -> bool:
        if not isinstance(message, EnergySample | PowerSwitch):
            return False
        run = self._run
        if message.device not in self._rounds.devices:
            raise MessageError("the energy of this device is not counted")
        if isinstance(message, EnergySample):
            self._rounds.sample(message, is_over=run.was_over)
            if not run.was_over:
                run.write(message)
        elif run.epoch is not None and not run.was_over:
            action = PowerOn() if message.powered else PowerOff()
            run.do(Act(message.device, action, "battery", at=run.device_time(message.at)))
        return True

    def tick(self, at: float) -> None:
        """Have the rounds recorded whose energy is known now."""
        run = self._run
        for order in self._rounds.orders(is_over=run.is_over) if run.has_started else ():
            run.order(AGGREGATOR, order)

    def finish(self, ended: events.RunEnded) -> None:
        """Write the energy of the devices up to the end of the run."""
        for sample in self._rounds.last_samples(ended.at, self._run.ended_early):
            self._run.write(sample)

    def sample(self, at: float) -> None:
        joules = self._read_host()
        self._host_joules = None if joules is None else joules - self._host_joules_before

    def _read_host(self) -> float | None:
        try:
            return None if self._host is None else self._host.joules()
        except (OSError, ValueError):
            self._host = None
            return None

    def figures(self) -> FeatureFigures | None:
        """Return the joules of the devices since the last start of the run clock, beside those of the
        host's processors, as they count them (RAPL), with its idle power and all its other work."""
        if not self._rounds.devices:
            return None
        emulated, host = self._rounds.consumed, self._host_joules
        measured = "not measured" if host is None else f"{_joules(host)} (RAPL)"
        text = f"energy: {_joules(emulated)} emulated, this host: {measured}"
        entry = {"emulated": rounded(emulated), "host": rounded(host)}
        return FeatureFigures(feature="energy", entry=entry, summary=text)

    def carry_out(self, name: str, action: Action) -> None:
        """Raise BadInputError if the device lacks the battery or the charger that `action` needs."""
        if not isinstance(action, SetBattery | Charge | Unplug):
            return
        energy = self._rounds.devices.get(name)
        if energy is None or energy.battery is None:
            raise BadInputError(f"{name} has no battery: add energy with a battery to its group")
        if action == Charge() and energy.charger is None:
            raise BadInputError(f"{name} has no charger: give the power of one, such as 10W")

    def problems(self) -> Iterator[str]:
        return self._rounds.problems()


def _joules(value: float) -> str:
    return f"{value:.0f} J" if value >= 100 else f"{value:.3g} J"


@dataclass(slots=True)
class _Consumption:
    """Times are device time in seconds."""

    times: array[float] = field(default_factory=lambda: array("d"))
    energies: array[float] = field(default_factory=lambda: array("d"))
    """Joules without transfers."""
    levels: array[float] = field(default_factory=lambda: array("d"))
    """From 0 to 1; NaN if the device has no battery."""

    def add(self, at: float, energy: float, level: float | None) -> None:
        """A sample that is not newer than the last one is ignored."""
        if not self.times or at > self.times[-1]:
            self.times.append(at)
            self.energies.append(energy)
            self.levels.append(math.nan if level is None else level)

    def add_sample(self, at: float, figures: EnergyFigures) -> None:
        self.add(at, figures.consumed - figures.transferred, figures.level)

    def covers(self, at: float) -> bool:
        return bool(self.times) and self.times[-1] >= at

    def until(self, at: float) -> float:
        """Interpolate between samples. After the last sample, the last power counts."""
        return self._at(at, self.energies)

    def level(self, at: float) -> float | None:
        """Interpolate between samples. None if the device has no battery."""
        level = self._at(at, self.levels)
        return None if math.isnan(level) else min(1.0, max(0.0, level))

    def _at(self, at: float, values: array[float]) -> float:
        if len(self.times) < 2:
            return values[0] if values else math.nan
        after = min(max(1, bisect.bisect_right(self.times, at)), len(self.times) - 1)
        begin, end = self.times[after - 1], self.times[after]
        before, last = values[after - 1], values[after]
        return before + (last - before) * (max(at, begin) - begin) / (end - begin)

    def cut(self, at: float) -> None:
        """Forget what comes from `at` on."""
        kept = bisect.bisect_left(self.times, at)
        if kept < len(self.times):
            last = math.nextafter(at, -math.inf), self.until(at), self._at(at, self.levels)
            for values, value in zip((self.times, self.energies, self.levels), last, strict=True):
                values[kept:] = array("d", [value] if kept else [])

    def forget(self, before: float) -> None:
        """Forget the samples that are not needed for times from `before` on."""
        unused = bisect.bisect_right(self.times, before) - 1
        if unused > 0:
            del self.times[:unused]
            del self.energies[:unused]
            del self.levels[:unused]


@dataclass(frozen=True, slots=True)
class _EndedRound:
    """Times are device time in seconds."""

    client: str
    dispatch: int
    begin: float
    """Time from which the consumption counts."""
    end: float
    """Time until which it counts."""
    at: float
    transfers: float
    """Joules of the model's and the update's bytes."""
    is_sent: bool


class RoundEnergies:
    """`model_bytes`: size of a model on the wire."""

    def __init__(self, plan: Plan, model_bytes: int) -> None:
        self._configs: Mapping[str, EnergyConfig] = {
            device.name: device.energy for device in plan.devices if device.energy is not None
        }
        self._model_bytes = model_bytes
        self._dilation = plan.dilation
        self._epoch = 0.0
        self._consumption = {device: _Consumption() for device in self._configs}
        self._consumed = dict.fromkeys(self._configs, 0.0)
        """Device -> joules at its last sample."""
        self._newest: dict[str, tuple[EnergySample, EnergySample]] = {}
        """Last two samples of each device, the later one at most the first after the run's end."""
        self._closed: set[str] = set()
        """Devices with a sample after the run's end."""
        self._consumed_before = dict.fromkeys(self._configs, 0.0)
        """Device -> joules at the last start of the run clock."""
        self._ended: list[_EndedRound] = []
        """Their energy is not known yet, because it needs a later sample."""
        self._counted = dict.fromkeys(self._configs, 0.0)
        """Device -> device time in seconds until which its consumption belongs to ended rounds."""
        self._rejected: set[tuple[str, int]] = set()
        """Device and dispatch of the rejected updates whose rounds have no record yet."""

    @property
    def consumed(self) -> float:
        """Joules of all devices since the last start of the run clock in this process."""
        return sum(self._consumed[name] - self._consumed_before[name] for name in self._consumed)

    @property
    def devices(self) -> Mapping[str, EnergyConfig]:
        return self._configs

    def resume(
        self, records: Sequence[events.Record], samples: Iterable[EnergySample], zero: float
    ) -> None:
        """Take over the rounds of earlier legs of the run that have no record of their energy yet.
        `records`, `samples`: those of the earlier legs. `zero`: Unix time at which the samples'
        clock was 0, in seconds."""
        starts = [one for one in records if isinstance(one, events.RunStarted)]
        ends = [*(one.at for one in starts[1:]), math.inf]
        for sample in samples:
            unix = sample.at + zero
            leg = bisect.bisect_right(starts, unix, key=lambda one: one.wall_clock) - 1
            if leg < 0 or sample.device not in self._consumption:
                continue
            at = starts[leg].at + (unix - starts[leg].wall_clock) / self._dilation
            if at <= ends[leg]:  # the clock stands still between two legs
                self._consumption[sample.device].add_sample(at, sample.energy)
        for record in records:
            self.record(record)
        known = {(one.client, one.dispatch) for one in records if isinstance(one, RoundEnergy)}
        self._ended = [one for one in self._ended if (one.client, one.dispatch) not in known]
        begins = {one.client: one.begin for one in reversed(self._ended)}
        for device, consumption in self._consumption.items():
            consumption.forget(min(begins.get(device, math.inf), self._counted[device]))

    def start(
        self, epoch: float, at: float, earlier: Mapping[str, EnergyFigures]
    ) -> Iterator[EnergyStart]:
        """Yield the orders to start. `epoch`: reading of the monotonic clock at device time 0. `at`:
        device time in seconds. `earlier`: at the end of the run's earlier leg."""
        self._epoch = epoch
        for device, consumption in self._consumption.items():
            figures = earlier.get(device)
            battery = self._configs[device].battery
            level = None if battery is None else battery.initial
            begin = figures or EnergyFigures(consumed=0.0, transferred=0.0, power=0.0, level=level)
            first = EnergySample(device, epoch + max(0.0, at) * self._dilation, begin)
            self._newest[device] = first, first
            if figures is not None:
                self._consumed[device] = figures.consumed
            self._consumed_before[device] = self._consumed[device]
            if figures is not None:
                consumption.cut(at)  # a run may go on from a moment before its last sample
                consumption.add_sample(at, figures)
            elif not consumption.times:
                consumption.add_sample(at, begin)
            yield EnergyStart(device, epoch, max(0.0, at), figures)

    def sample(self, sample: EnergySample, *, is_over: bool = False) -> None:
        """`is_over`: whether the run is over."""
        if sample.device in self._consumption:
            if sample.device in self._newest and sample.device not in self._closed:
                self._newest[sample.device] = self._newest[sample.device][1], sample
            if is_over:
                self._closed.add(sample.device)
            at = (sample.at - self._epoch) / self._dilation
            figures = sample.energy
            self._consumed[sample.device] = figures.consumed
            self._consumption[sample.device].add_sample(at, figures)

    def last_samples(self, at: float, ended: Collection[str]) -> Iterator[EnergySample]:
        """Yield the sample of each device at device time `at`, at which the run ended. Devices in
        `ended` have ended; their last sample counts if it is older."""
        end = self._epoch + at * self._dilation
        for device, (first, last) in self._newest.items():
            figures = last.energy
            if first.at < last.at and (end <= last.at or (figures.is_on and device not in ended)):
                figures = _interpolate(first, last, end)
            self._consumed[device] = figures.consumed
            yield EnergySample(device, end, figures)

    def record(self, record: events.Record) -> None:
        """Rounds of devices whose energy is not counted are ignored."""
        match record:
            case events.UpdateApplied(client=client) if client in self._configs:
                self._end(
                    _EndedRound(
                        client,
                        record.dispatch,
                        record.train_start,
                        record.train_end,
                        record.sent,
                        self._transfers(client, record.bytes),
                        is_sent=True,
                    )
                )
            case events.UpdateRejected(client=client) if client in self._configs:
                self._rejected.add((client, record.dispatch))
            case events.RoundUnfinished(client=client) if client in self._configs:
                is_sent = (client, record.dispatch) in self._rejected
                self._rejected.discard((client, record.dispatch))
                begin = max(record.dispatched, self._counted[client])
                sent = self._model_bytes if is_sent else 0
                self._end(
                    _EndedRound(
                        client,
                        record.dispatch,
                        begin,
                        max(begin, record.until),
                        record.until,
                        self._transfers(client, sent),
                        is_sent=is_sent,
                    )
                )

    def _transfers(self, client: str, sent: int) -> float:
        config = self._configs[client]
        return config.transfer(sent=sent, received=self._model_bytes)

    def _end(self, ended: _EndedRound) -> None:
        self._ended.append(ended)
        self._counted[ended.client] = max(self._counted[ended.client], ended.end)

    def orders(self, *, is_over: bool = False) -> list[EnergyOrder]:
        """Orders to record the rounds whose energy is known now. `is_over`: whether the run is over, so
        that no later sample is awaited."""
        found, left = [], []
        for one in self._ended:
            if is_over or self._consumption[one.client].covers(one.end):
                found.append(self._order(one))
            else:
                left.append(one)
        self._ended = left
        return found

    def problems(self) -> Iterator[str]:
        if strange := {one.client for one in self._ended} - self._configs.keys():
            yield f"the energy of {sorted(strange)} is not counted"

    def _order(self, ended: _EndedRound) -> EnergyOrder:
        consumption = self._consumption[ended.client]
        energy = consumption.until(ended.end) - consumption.until(ended.begin) + ended.transfers
        level = consumption.level(ended.at)
        consumption.forget(ended.begin)
        outcome: Literal["sent", "lost"] = "sent" if ended.is_sent else "lost"
        return EnergyOrder(ended.at, ended.client, ended.dispatch, max(0.0, energy), outcome, level)


def _interpolate(first: EnergySample, last: EnergySample, at: float) -> EnergyFigures:
    """Return the figures at the time `at`. After the later sample, the mean power between the samples
    counts, for at most twice as long as these are apart."""
    share = min(3.0, (at - first.at) / (last.at - first.at))
    before, figures = first.energy, last.energy

    def mix(begin: float | None, end: float | None, most: float = math.inf) -> float | None:
        return (
            end if begin is None or end is None else min(most, max(0.0, begin + (end - begin) * share))
        )

    return msgspec.structs.replace(
        figures,
        consumed=mix(before.consumed, figures.consumed),
        transferred=mix(before.transferred, figures.transferred),
        level=mix(before.level, figures.level, 1.0),
        supplied=mix(before.supplied, figures.supplied),
    )


def energy_samples(samples: Samples) -> Iterator[EnergySample]:
    """Yield the energy samples among the new `samples` of a run's telemetry."""
    for sample in samples.read():
        if "energy" in sample:
            with suppress(msgspec.ValidationError):
                figures = msgspec.convert(sample["energy"], EnergyFigures)
                yield EnergySample(sample["device"], sample["at"], figures)

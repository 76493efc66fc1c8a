"""Energy of the devices in virtual time: exact consumption, batteries, and the energy of each round.

A device consumes its idle power while it is on, in addition the power of its CPU while it computes, and
energy for each byte that it sends or receives. Received bytes are counted when a message arrives, sent
bytes when an upload begins.

A round has the energy to receive its model, everything that the device consumes during the training
except transfers, and the energy to send its update. The rest is `DeviceEnergy.idle`. The sum of the
rounds that were sent or lost, of those in progress, and of the rest is the consumption, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from agents import events
from agents.device_actions import PowerOff, PowerOn, to_json
from agents.energy import EnergyAccount, Femtojoules, to_joules, to_watts
from agents.energy.init import figures_of
from agents.energy.messages import Charge, EnergySample, RoundEnergy, SetBattery, Source, Unplug
from agents.fields import FeatureAction
from agents.timing.nanoseconds import SECOND, Nanoseconds, from_seconds, to_seconds
from testbed.plan import PlannedDevice
from testbed.plan.agent_configs import RunSpec
from testbed.virtual import faults
from testbed.virtual.device import VirtualHalf
from testbed.virtual.faults import World
from testbed.virtual.network import VirtualNetwork
from testbed.virtual.part import VirtualFleet, Write
from testbed.virtual.timing import SCENARIO, EventQueue

_SOURCE: Source = "battery"


@dataclass(slots=True)
class _OpenRound:
    """A round whose update is not sent yet."""

    dispatch: int
    energy: Femtojoules


class DeviceEnergy(VirtualHalf):
    """Energy of one device, over all its restarts. `index`: position of the device in device order.
    `check`: as of FleetEnergy."""

    def __init__(
        self, device: PlannedDevice, index: int, check: Callable[[str], None] = lambda _: None
    ) -> None:
        assert device.energy is not None  # noqa: S101  (only such devices have an account)
        self.name = device.name
        self.index = index
        self._check = check
        self.account = EnergyAccount(device.energy, device.cpu)
        self._runs_while_timed = device.cpu is None and device.gflops is None
        """True if nothing is known of the device's speed but its `timing`: then it computes during all
        of that."""
        self.check_at: Nanoseconds | None = None
        """Device time of the planned check of the battery."""
        self.idle: Femtojoules = 0
        self.rounds: Femtojoules = 0
        """Rounds that were sent or lost."""
        self._share = None if device.gflops is not None else device.cpu
        self._work = self.account.busy
        """µW of the CPU while the device computes, beside the idle power."""
        self._busy_until: Nanoseconds = 0
        """Device time at which the computation ends without a pause."""
        self._left: Nanoseconds | None = None
        """Computation left; None if the device is not paused."""
        self._received: dict[int, Femtojoules] = {}
        """Energy to receive the models that are not used yet, by dispatch."""
        self._rounds: dict[int, _OpenRound] = {}
        """Rounds whose update is not sent yet, by the update's sequence number."""
        self._training: _OpenRound | None = None
        """Round whose training is in progress."""
        self._sampled: tuple[Nanoseconds, Femtojoules] = (-1, 0)
        """Device time of the newest sample, and the consumption until then."""

    def advance(self, now: Nanoseconds) -> None:
        if self._left is None and self._busy_until > self.account.at:
            self._count(min(now, self._busy_until), self._work)
        self._count(now, 0)

    def _count(self, to: Nanoseconds, work: int) -> None:
        account = self.account
        if to <= account.at:
            return
        before = account.consumed
        account.advance(to, work * (to - account.at))
        self._assign(self._training, account.consumed - before)

    def _assign(self, to: _OpenRound | None, energy: Femtojoules) -> None:
        if to is None:
            self.idle += energy
        else:
            to.energy += energy

    @property
    def in_progress(self) -> Femtojoules:
        """Rounds that are neither sent nor lost."""
        models = sum(self._received.values())
        return models + sum(one.energy for one in self._rounds.values())

    @property
    def work(self) -> int:
        """µW beside the idle power."""
        computes = self._left is None and self._busy_until > self.account.at
        return self._work if computes else 0

    # Computation

    def compute(self, now: Nanoseconds, duration: Nanoseconds, timed: Nanoseconds) -> None:
        self._compute(now, timed if self._runs_while_timed else duration)

    def _compute(self, now: Nanoseconds, duration: Nanoseconds) -> None:
        self.advance(now)
        if self._left is None:
            self._busy_until = now + duration
        else:
            self._left = duration

    def compute_more(self, now: Nanoseconds, duration: Nanoseconds) -> None:
        left = max(0, self._busy_until - now) if self._left is None else self._left
        self._compute(now, left + duration)

    def start(self, now: Nanoseconds, duration: Nanoseconds, *, is_frozen: bool) -> None:
        self.thaw(now)
        self._compute(now, duration)
        if is_frozen:
            self.freeze(now)

    def freeze(self, now: Nanoseconds) -> None:
        self.advance(now)
        if self._left is None:
            self._left = max(0, self._busy_until - now)

    def thaw(self, now: Nanoseconds) -> None:
        self.advance(now)
        if self._left is not None:
            self._busy_until, self._left = now + self._left, None

    def set_share(self, now: Nanoseconds, share: float) -> None:
        """The power of the CPU is proportional to its share."""
        self.advance(now)
        if self._share is not None:
            self._work = round(self.account.busy * share / self._share)

    # Rounds

    def receive(self, now: Nanoseconds, dispatch: int, received: int, sent: int) -> None:
        self.advance(now)
        energy = self.account.transfer(sent=sent, received=received)
        if dispatch:
            self._received[dispatch] = self._received.get(dispatch, 0) + energy
        else:
            self.idle += energy

    def send(self, now: Nanoseconds, sent: int, received: int) -> None:
        self.advance(now)
        self.idle += self.account.transfer(sent=sent, received=received)

    def begin_training(self, now: Nanoseconds, sequence: int, dispatch: int) -> Iterator[RoundEnergy]:
        """Begin the round of the update `sequence`. Yield records of the rounds that end by it: models
        that were replaced, and a replaced update in the send buffer."""
        self.advance(now)
        model = self._received.pop(dispatch, 0)
        yield from self._lose_models(now)
        for old in [old for old in self._rounds if old <= sequence - 2]:
            yield self._close(now, self._rounds.pop(old), "lost")
        self._training = self._rounds[sequence] = _OpenRound(dispatch, model)

    def end_training(self, now: Nanoseconds) -> None:
        """The update is sent later."""
        self.advance(now)
        self._training = None

    def send_update(
        self, now: Nanoseconds, sequence: int, sent: int, received: int
    ) -> Iterator[RoundEnergy]:
        self.advance(now)
        energy = self.account.transfer(sent=sent, received=received)
        done = self._rounds.pop(sequence, None)
        self._assign(done, energy)
        if done is not None:
            self._training = None if done is self._training else self._training
            yield self._close(now, done, "lost" if self.account.must_switch else "sent")

    def stop(self, now: Nanoseconds) -> Iterator[RoundEnergy]:
        """Yield records of the rounds that are lost by the end of the client's work."""
        self.advance(now)
        self._busy_until = now
        self._left = None if self._left is None else 0
        self._training = None
        for sequence in list(self._rounds):
            yield self._close(now, self._rounds.pop(sequence), "lost")
        yield from self._lose_models(now)

    def _lose_models(self, now: Nanoseconds) -> Iterator[RoundEnergy]:
        """Models that were received, but will not be used."""
        for dispatch in list(self._received):
            yield self._close(now, _OpenRound(dispatch, self._received.pop(dispatch)), "lost")

    def _close(self, now: Nanoseconds, done: _OpenRound, outcome: str) -> RoundEnergy:
        self.rounds += done.energy
        joules, level = to_joules(done.energy), self.account.level
        return RoundEnergy(
            to_seconds(now),
            self.name,
            done.dispatch,
            joules,
            outcome,
            math.nan if level is None else level,
        )

    # Battery

    def act(self, now: Nanoseconds, action: FeatureAction) -> None:
        if isinstance(action, SetBattery | Charge | Unplug):
            self.advance(now)
            self.account.act(action)

    def leave(self, now: Nanoseconds) -> None:
        self.set_present(now, present=False)

    def allows_start(self, now: Nanoseconds, *, joins: bool) -> bool:
        if joins:
            self.set_present(now, present=True)
            self._check(self.name)
        return self.account.is_on

    def set_present(self, now: Nanoseconds, *, present: bool) -> None:
        """An absent device consumes nothing."""
        self.advance(now)
        self.account.is_counted = present

    def switches_eventually(self) -> bool:
        """True if the device ever powers off or returns while nothing else happens."""
        return self.account.switches_eventually(self.work)

    def sample(self, now: Nanoseconds) -> EnergySample:
        self.advance(now)
        account = self.account
        since, consumed = self._sampled
        self._sampled = now, account.consumed
        draw = (account.consumed - consumed) / (now - since) if now > since else self._power_now()
        return EnergySample(self.name, to_seconds(now), figures_of(account, to_watts(1) * draw))

    def _power_now(self) -> int:
        is_used = self.account.is_on and self.account.is_counted
        return self.account.idle + self.work if is_used else 0

    def is_sample_due(self, now: Nanoseconds, period: Nanoseconds) -> bool:
        return now >= self._sampled[0] + period

    def is_sampled_at(self, now: Nanoseconds) -> bool:
        return self._sampled[0] == now


class FleetEnergy(VirtualFleet):
    """`absent`: devices that join during the run. `write`: writes a sample. `every`: nanoseconds between
    two samples of a device to which something happens."""

    def __init__(
        self,
        devices: Iterable[tuple[int, PlannedDevice]],
        absent: frozenset[str],
        queue: EventQueue,
        write: Callable[[EnergySample], None],
        every: Nanoseconds = SECOND,
    ) -> None:
        self.devices = {
            device.name: DeviceEnergy(device, index, self.check) for index, device in devices
        }
        self._absent = absent
        self._queue = queue
        self._write = write
        self._every = every
        self._checks = 0
        """Checks of batteries in the event queue, with those that are not needed any more."""

    def begin(self, world: World) -> Collection[str]:
        self._world = world
        self._unpowered = set()
        for name, one in self.devices.items():
            if name in self._absent:
                one.set_present(0, present=False)
            elif one.account.must_switch:
                one.account.switch()
                self._unpowered.add(name)
        self.sample()
        return self._unpowered

    def start(self) -> None:
        for name in filter(self._unpowered.__contains__, self._world.names):
            self._world.write(events.Acted(0.0, name, _SOURCE, 0.0, to_json(PowerOff())))
        for name in self.devices:
            self.check(name)

    def half(self, name: str) -> VirtualHalf | None:
        return self.devices.get(name)

    def check(self, name: str) -> None:
        """Power the device off or on if its battery requires it. Plan the next check."""
        if (one := self.devices.get(name)) is None:
            return
        now = self._queue.now
        one.advance(now)
        if one.account.must_switch:
            self._switch(one, now)
        if one.is_sample_due(now, self._every):
            self._write(one.sample(now))
        ahead = one.account.outlook(one.work)
        if ahead is not None and (one.check_at is None or ahead.at < one.check_at):
            one.check_at = ahead.at
            self._checks += 1
            due = partial(self._due, one, ahead.at)
            self._queue.plan(ahead.at, SCENARIO, 1 + one.index, due)  # after the scenario's steps

    def _switch(self, one: DeviceEnergy, now: Nanoseconds) -> None:
        one.account.switch()
        action = PowerOn() if one.account.is_on else PowerOff()
        self._world.write(events.Acted(to_seconds(now), one.name, _SOURCE, 0.0, to_json(action)))
        if one.account.loses_memory and not one.account.is_on:
            self._world.device(one.name).memory = None
        faults.act(self._world, one.name, action, now)
        self._write(one.sample(now))

    def _due(self, one: DeviceEnergy, at: Nanoseconds) -> None:
        self._checks -= 1
        if one.check_at == at:  # else an earlier check was planned in its place
            one.check_at = None
            self.check(one.name)

    @property
    def idle_callbacks(self) -> int:
        return self._checks

    @property
    def will_act(self) -> bool:
        return any(one.switches_eventually() for one in self.devices.values())

    def sample(self) -> None:
        now = self._queue.now
        for one in self.devices.values():
            if not one.is_sampled_at(now):
                self._write(one.sample(now))

    def end(self) -> None:
        self._checks = 0
        self.sample()


def make_fleet(
    spec: RunSpec, queue: EventQueue, _network: VirtualNetwork, write: Write
) -> FleetEnergy | None:
    devices = [(k, one) for k, one in enumerate(spec.plan.devices) if one.energy is not None]
    if not devices:
        return None
    every = from_seconds(spec.topology.evaluate.every)
    return FleetEnergy(devices, spec.plan.absent, queue, write, every)

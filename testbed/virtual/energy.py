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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from agents.energy import EnergyAccount, Femtojoules, to_joules, to_watts
from agents.energy.init import figures_of
from agents.energy.messages import Charge, EnergySample, RoundEnergy, SetBattery, Unplug
from agents.timing.nanoseconds import SECOND, Nanoseconds, to_seconds
from testbed.plan import PlannedDevice


@dataclass(slots=True)
class _OpenRound:
    """A round whose update is not sent yet."""

    dispatch: int
    energy: Femtojoules


class DeviceEnergy:
    """Energy of one device, over all its restarts. `index`: position of the device in device order."""

    def __init__(self, device: PlannedDevice, index: int) -> None:
        assert device.energy is not None  # noqa: S101  (only such devices have an account)
        self.name = device.name
        self.index = index
        self.account = EnergyAccount(device.energy, device.cpu)
        self.runs_while_timed = device.cpu is None and device.gflops is None
        """True if nothing is known of the device's speed but its `timing`: then it computes during all
        of that."""
        self.restarts_with_power = False
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

    def compute(self, now: Nanoseconds, duration: Nanoseconds) -> None:
        """Replaces what the device has computed."""
        self.advance(now)
        if self._left is None:
            self._busy_until = now + duration
        else:
            self._left = duration

    def compute_more(self, now: Nanoseconds, duration: Nanoseconds) -> None:
        """Adds to what the device computes."""
        left = max(0, self._busy_until - now) if self._left is None else self._left
        self.compute(now, left + duration)

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
        """`dispatch`: of the model; 0 for another message. `received`, `sent`: bytes of the message, and
        of its acknowledgements."""
        self.advance(now)
        energy = self.account.transfer(sent=sent, received=received)
        if dispatch:
            self._received[dispatch] = self._received.get(dispatch, 0) + energy
        else:
            self.idle += energy

    def send(self, now: Nanoseconds, sent: int, received: int) -> None:
        """Count a message that is not an update. `sent`, `received`: bytes of the message, and of its
        acknowledgements."""
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
    ) -> RoundEnergy | None:
        """None if the round has ended."""
        self.advance(now)
        energy = self.account.transfer(sent=sent, received=received)
        done = self._rounds.pop(sequence, None)
        self._assign(done, energy)
        if done is None:
            return None
        self._training = None if done is self._training else self._training
        return self._close(now, done, "lost" if self.account.must_switch else "sent")

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

    def act(self, now: Nanoseconds, action: SetBattery | Charge | Unplug) -> None:
        self.advance(now)
        self.account.act(action)

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


class FleetEnergy:
    """`write`: writes a sample. `every`: nanoseconds between two samples of a device to which something
    happens."""

    def __init__(
        self,
        devices: Mapping[str, DeviceEnergy],
        write: Callable[[EnergySample], None],
        every: Nanoseconds = SECOND,
    ) -> None:
        self.devices = devices
        self._write = write
        self._every = every
        self.checks = 0
        """Checks of batteries in the event queue, with those that are not needed any more."""

    def sample(self, one: DeviceEnergy, now: Nanoseconds) -> None:
        self._write(one.sample(now))

    def sample_if_due(self, one: DeviceEnergy, now: Nanoseconds) -> None:
        if one.is_sample_due(now, self._every):
            self.sample(one, now)

    def sample_all(self, now: Nanoseconds) -> None:
        for one in self.devices.values():
            if not one.is_sampled_at(now):
                self.sample(one, now)

    @property
    def switch_is_ahead(self) -> bool:
        """True if any device powers off or returns while nothing else happens."""
        return any(one.switches_eventually() for one in self.devices.values())

"""The controller's half of energy: rounds, power-offs and returns, and the host's own energy beside."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from agents import events
from agents.device_actions import Action, PowerOff, PowerOn, to_json
from agents.energy.messages import Charge, EnergySample, PowerSwitch, SetBattery, Unplug
from agents.mqtt.topics import AGGREGATOR
from agents.wire.messages import AddressedOrder, LogOrder, MessageError
from testbed.errors import BadInputError
from testbed.fidelity.figures import rounded
from testbed.fidelity.part import FeatureFigures
from testbed.host import cpus
from testbed.plan.agent_configs import RunSpec, model_bytes
from testbed.run.round_energy import RoundEnergies, energy_samples
from testbed.rundir.live_files import Samples
from testbed.runtimes import Runtime


class EnergyPart:
    """Energy of the devices of `spec` that count it; nothing happens if none does."""

    def __init__(self, spec: RunSpec, runtime: Runtime) -> None:
        self._runtime = runtime
        self._dilation = spec.plan.dilation
        is_counted = any(device.energy is not None for device in spec.plan.devices)
        self._rounds = RoundEnergies(spec.plan, model_bytes(spec.topology) if is_counted else 0)
        earlier = Samples(spec.directory.telemetry)
        samples = [*energy_samples(earlier)] if is_counted else []
        self._earlier_samples, self._earlier_zero = samples, earlier.zero or 0.0
        """Energy samples of the run's earlier segments, and the Unix time at which their clock was 0."""
        self._epoch: float | None = None
        self._host = cpus.rapl_meter() if is_counted else None
        """Meter of the host; None if it has no readable counters, or nothing is to be counted."""
        self._host_joules: float | None = None
        """Energy of the host since the last start of the run clock; None if not measured."""
        self._host_joules_before = 0.0

    @property
    def comparison(self) -> FeatureFigures | None:
        """Joules of the devices since the last start of the run clock, beside those of the host's
        processors, as they count them (RAPL), with its idle power and all its other work. None if no
        device's energy is counted."""
        if not self._rounds.devices:
            return None
        emulated, host = self._rounds.consumed, self._host_joules
        measured = "not measured" if host is None else f"{_joules(host)} (RAPL)"
        text = f"energy: {_joules(emulated)} emulated, this host: {measured}"
        entry = {"emulated": rounded(emulated), "host": rounded(host)}
        return FeatureFigures(feature="energy", entry=entry, summary=text)

    def resume(self, past: Sequence[events.Record]) -> None:
        """Take over the rounds of the run's earlier segments."""
        self._rounds.resume(past, self._earlier_samples, self._earlier_zero)

    def start(self, epoch: float, at: float) -> Iterator[AddressedOrder]:
        """Start to count. `epoch`: reading of the monotonic clock at device time 0. `at`: device time in
        seconds."""
        self._epoch = epoch
        earlier = {one.device: one.energy for one in self._earlier_samples}
        self._earlier_samples.clear()
        if (joules := self._read_host()) is not None:
            self._host_joules_before = joules
        for order in self._rounds.start(epoch, at, earlier):
            yield from self._runtime.meter.obey(order)

    def record(self, record: events.Record) -> None:
        self._rounds.record(record)

    def take(self, message: EnergySample | PowerSwitch, *, is_over: bool) -> Iterator[AddressedOrder]:
        """Take a message of a device, and yield what follows. Raises MessageError."""
        if message.device not in self._rounds.devices:
            raise MessageError("the energy of this device is not counted")
        if isinstance(message, EnergySample):
            self._rounds.sample(message, is_over=is_over)
        elif self._epoch is not None and not is_over:
            action = PowerOn() if message.powered else PowerOff()
            yield from self._runtime.act(message.device, action)
            at = (message.at - self._epoch) / self._dilation
            yield AGGREGATOR, LogOrder(at, message.device, "battery", 0.0, to_json(action))

    def last_samples(self, at: float, ended: Collection[str]) -> Iterator[EnergySample]:
        """Yield the sample of each device at device time `at`, at which the run ended. Devices in
        `ended` ended earlier."""
        return self._rounds.last_samples(at, ended)

    def orders(self, *, is_over: bool) -> Iterator[AddressedOrder]:
        """Yield the orders to record the rounds whose energy is known now."""
        return ((AGGREGATOR, one) for one in self._rounds.orders(is_over=is_over))

    def sample_host(self) -> None:
        """Read the host's energy. Called about once a second while the run clock goes."""
        joules = self._read_host()
        self._host_joules = None if joules is None else joules - self._host_joules_before

    def _read_host(self) -> float | None:
        try:
            return None if self._host is None else self._host.joules()
        except (OSError, ValueError):
            self._host = None
            return None

    def check(self, device: str, action: Action) -> None:
        """Raise BadInputError if `device` lacks the battery or the charger that `action` needs."""
        if not isinstance(action, SetBattery | Charge | Unplug):
            return
        energy = self._rounds.devices.get(device)
        if energy is None or energy.battery is None:
            raise BadInputError(f"{device} has no battery: add energy with a battery to its group")
        if action == Charge() and energy.charger is None:
            raise BadInputError(f"{device} has no charger: give the power of one, such as 10W")


def _joules(value: float) -> str:
    return f"{value:.0f} J" if value >= 100 else f"{value:.3g} J"

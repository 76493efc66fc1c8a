"""Controller of one run. It starts the runtime, waits at the start barrier, follows the run, and takes
it down.

The controller takes no part in the learning. Once the run clock has started, aggregator and clients need
nothing from the controller.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Never

from agents import events, user_code
from agents.config import LOGGED, AccessLink, BrokerAccess
from agents.device_actions import (
    Crash,
    DeviceState,
    SetCpu,
)
from agents.disk import files
from agents.disturbances import (
    LATE_SECONDS,
    LONGEST_SECONDS,
    STANDSTILL_SECONDS,
    UNANSWERED_SECONDS,
    Ongoing,
    cut,
    read_hanging,
)
from agents.energy.messages import EnergySample, PowerSwitch
from agents.mqtt.rate_limit import RateLimit
from agents.mqtt.topics import AGGREGATOR, ROUTER, Topics
from agents.mqtt.transport import Connection, ConnectionFailedError, Inbox, ReceivedMessage
from agents.texts import quantity
from agents.timing.clock import in_device_time
from agents.wire import messages
from agents.wire.messages import AddressedOrder, MeasureOrder, MessageError, NoteOrder
from testbed.broker import BROKER
from testbed.errors import BadInputError, HostError, RunFailedError, free_space
from testbed.fidelity import SegmentClock, host_load, measure, requested
from testbed.fidelity.figures import RATES, Fidelity, differences
from testbed.fidelity.host_load import HostSample, OtherWork, Sampler, pause
from testbed.fidelity.part import FeatureFigures
from testbed.fidelity.validity import (
    FAILED_LINK_PERCENT,
    doubt_note,
    link_doubt,
    wrong_links,
)
from testbed.host import cpus
from testbed.host.cpus import CpuReading, cpu_numbers
from testbed.host.gpus import MPS
from testbed.host.processes import uninterrupted
from testbed.plan.agent_configs import CODE, RunSpec
from testbed.plan.planned_devices import action_steps
from testbed.run.energy_part import EnergyPart
from testbed.run.scenario_player import AwaitedDevices, ScenarioPlayer, parse_command
from testbed.rundir.live_files import JUST_NOW, CommandFolder, RecordFollower, Samples
from testbed.runtimes import Runtime
from testbed.segments import measured as segments
from testbed.segments.measured import SegmentFidelity, segment_doubt, wrong_segments
from testbed.view import View

_TICK_SECONDS = 0.1
_SUPERVISION_INTERVAL_SECONDS = 1.0
_OTHER_HOSTS_INTERVAL_SECONDS = 10.0
"""Seconds between two samples of clock and load."""
_MESSAGE_RATE = 100, 10.0
"""Messages per topic: burst size, and messages per second. A device sends only one sample per second."""
_INBOX_BYTES = 8 * 2**20
"""Bytes that wait to be handled."""
_END_TIMEOUT_SECONDS = 3.0
"""Seconds within which a container must end after its client."""
_LAST_SECONDS = 1.0
"""Seconds that devices have to end after the aggregator."""
_TRACEBACK_LINES = 40
"""Log lines to show if the user's own code raised an exception."""
_ASKING_INTERVAL_SECONDS, _LIMITS_TIMEOUT_SECONDS = 0.5, 3.0
"""Seconds between two requests to read the limits of a device's container, and seconds after which wrong
limits are an error."""
_LOSSY = 0.05
"""Packet loss (as a share) above which a connection may by chance be silent for some seconds."""
_MAX_RESTARTS = 3
"""Restarts of broker and aggregator in a run."""
_STOP_TIMEOUT_SECONDS = 4.0
"""Seconds that the aggregator has to finish its records when a run is interrupted."""

_NETWORK_HINT = (
    ". If testbed runs in a container, give that container the host's network: --network host"
)


@dataclass(slots=True)
class Timings:
    """Seconds of wall time."""

    launch: float = 0.0
    """From the start until every process or container was started."""
    ready: float = 0.0
    """From the end of `launch` until every client was ready."""
    down: float = 0.0
    """From the end of the run until everything was removed."""

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 2) for name, value in dataclasses.asdict(self).items()}


_RECORDS_OF_A_RUN = (
    events.RunStarted,
    events.UpdateApplied,
    events.VersionMade,
    events.Evaluated,
    events.RunEnded,
)
"""Records that an aggregator does not write before the run clock starts."""


def _read(follower: RecordFollower) -> list[events.Record]:
    try:
        return follower.read()
    except ValueError as error:
        raise RunFailedError(str(error)) from error


def _tail(records: Sequence[events.Record]) -> Sequence[events.Record]:
    """Return what follows the last record that is only written while the run clock goes."""
    return [*takewhile(lambda one: not isinstance(one, _RECORDS_OF_A_RUN), reversed(records))][::-1]


class Controller:
    def __init__(self, spec: RunSpec, runtime: Runtime, view: View) -> None:
        self._spec = spec
        self._runtime = runtime
        self._view = view
        self._topics = Topics(spec.directory.run)
        self._inbox: Inbox[Never] = Inbox(_INBOX_BYTES)
        self._devices = {device.name for device in spec.plan.devices}
        self._real = {device.name for device in spec.plan.real_devices}
        self._awaited = self._devices - spec.plan.absent
        """Devices that must be ready before the run clock starts."""
        self._shares = {device.name: device.cpu or 0.0 for device in spec.plan.devices}
        """Current CPU share of each device, in cores."""
        self._unmeasured = set(spec.plan.probed_devices)
        """Devices whose link, and segments whose rate, is still being measured by others."""
        self._measured: dict[str, float] = {}
        """Time in seconds, on the monotonic clock, of the last measurement of each device's link that
        the device made."""
        self._before_links: CpuReading | None = None
        """CPU times of all processes before the last measurement of links."""
        self._requested_limits = {one.device: one.cpu[0].limits for one in requested.devices(spec, ())}
        """Planned limits of each emulated device's container; None if no control group limits it."""
        self._limited: dict[str, float] = {}
        """Time in seconds, on the monotonic clock, at which each device's limits were applied."""
        self._limits: dict[str, messages.LimitsRead] = {}
        """Limits of each device's container, as last read from the kernel."""
        self._asked: dict[str, float] = {}
        """Time in seconds, on the monotonic clock, at which the init of each device was last asked to
        read the limits."""
        self._status: dict[str, str] = {}
        self._most_ready = 0
        """Devices that were ready at once before the run clock started."""
        self._exit_codes: dict[str, int] = {}
        self._was_over = False
        """Whether the aggregator has reported that the run is over."""
        self._ended_early: set[str] = set()
        """Components that ended before the run was over."""
        self._exits: list[str] = []
        """Sentences on the devices that the last check found ended while the run clock went."""
        self._connection: Connection | None = None
        """Connection while the run clock is running; None before."""
        self._restarts = 0
        self._postponed: list[AddressedOrder] | None = None
        """Orders for the aggregator that are held back during a restart of the aggregator or a flood,
        because these orders would be lost. None if orders are sent at once."""
        self._follower = RecordFollower(spec.directory.events)
        self._probes = Samples(spec.directory.telemetry, 0)
        self._probed: list[dict[str, Any]] = []
        """Measurements of links so far, as lines of telemetry."""
        self._ended: events.RunEnded | None = None
        self._orders: list[AddressedOrder] = []
        self._dilation = spec.plan.dilation
        self._returning = AwaitedDevices(spec.topology.start.timeout)
        self._player = ScenarioPlayer(
            action_steps(spec.topology, spec.plan),
            runtime,
            self._orders.append,
            self._record_failure,
            self._dilation,
            spec.plan.segments,
        )
        self._energy = EnergyPart(spec, runtime)
        self._earlier_lines: set[str] = set()
        """Records of earlier segments that might be of this one, as lines."""
        self._commands = CommandFolder(spec.directory.orders)
        self._planned = {device.name: device for device in spec.plan.devices}
        self._states: dict[str, DeviceState] = {}
        """State of each device after actions on it. Devices without an action are left out."""
        self._stopped_since: dict[str, float] = {}
        """Time in seconds, on the monotonic clock, at which each process was found to be stopped by
        somebody else."""
        self._hanging: dict[str, float] = {}
        """Time in seconds, on the monotonic clock, since which own code has been known to hang, by
        sentence."""
        self._disturbances = Ongoing()
        self._lasting: dict[str, float] = {}
        """Start of each disturbance that is not over, in seconds on the monotonic clock, by reason."""
        self._heard: dict[str, float] = {}
        """Time in seconds, on the monotonic clock, of the last telemetry of each device."""
        self._refusals = messages.Refusals(self._note)
        for remark in spec.remarks:
            self._note(remark)
        self._rate_limit = RateLimit(*_MESSAGE_RATE)
        self.timings = Timings()
        self.host_samples: list[HostSample] = []
        """One sample per second while the run clock is running."""
        self.failures: list[str] = []
        """One sentence per failure, such as an action on a device that could not be carried out."""
        self.disruptions: list[events.Disrupted] = []
        """Disruptions that this process has learned of since the run clock started."""
        self.clocks: dict[str, float] = {}
        """Other host -> largest error so far, in seconds, of times converted to this host's clock."""
        self.other_samples: dict[str, list[HostSample]] = {}
        """Other host with devices -> its load samples. The samples are taken less often than once per
        second."""
        self._other_hosts: dict[str, HostSample | None] = {}
        """Other host with devices -> its last sample; None if its load is unknown."""
        self._used: dict[str, float] = {}
        """Device -> CPU seconds in its last sample."""
        self.epoch: float | None = None
        """Reading of the monotonic clock at device time 0; None before the run clock has started."""
        plan = spec.plan
        self._sampler = Sampler(
            plan.cpus,
            cpu_numbers(plan.device_cpus),
            runtime.meter.server_pids,
            runtime.meter.device_cpu_seconds,
            dilation=plan.dilation,
        )

    def run(self) -> events.RunEnded:
        """Run to the end, then remove everything. The removal also happens after an error or Ctrl-C.
        Raises RunFailedError or HostError."""
        try:
            ended = self._run()
        except BaseException as error:
            if isinstance(error, HostError) and self.epoch is not None:
                self.failures.insert(0, str(error))  # for example a node that left: the verdict names it
            try:
                self._take_down()
            except HostError as also:  # this is not why the run ended
                self._report_left(also)
            raise
        self._take_down()
        return ended

    def _take_down(self) -> None:
        with uninterrupted():
            begin = time.monotonic()
            self._runtime.stop()
            self.timings.down = time.monotonic() - begin
            self._view.progress(f"Everything removed in {self.timings.down:.1f} s")

    def _report_left(self, error: HostError) -> None:
        run = self._spec.directory.run
        self._view.progress(f"Not everything could be removed ({error}). Try: testbed down {run}")

    def _run(self) -> events.RunEnded:
        fleet = f"{quantity(len(self._devices), 'device')} ({self._spec.plan.runtime})"
        self._view.progress(f"Starting broker, aggregator and {fleet}")
        begin = time.monotonic()
        if any(not device.as_shaped.is_direct for device in self._spec.plan.devices):
            self._before_links = cpus.read_cpu_times()
        latest = RecordFollower(self._follower.path, JUST_NOW)
        self._earlier_lines = {*map(events.to_line, _tail(_read(latest)))}
        broker = self._runtime.start()
        self.timings.launch = time.monotonic() - begin
        self._check_processes()
        connection = self._connect(broker)
        try:
            if self._before_links is not None:
                self._sample_other_hosts()
            self._hold_barrier(connection)
            self._skip_earlier_records()
            doubt = self._check_links(connection)
            self.timings.ready = time.monotonic() - begin - self.timings.launch
            self._view.progress(
                f"Started in {self.timings.launch:.1f} s, ready after {self.timings.ready:.1f} s more; "
                "the run clock starts"
            )
            self._runtime.begin()
            self.clocks.clear()
            self._sample_other_hosts()
            self.other_samples.clear()  # the load of the start is not the run's
            self._connection = connection
            self._send(connection, (AGGREGATOR, messages.StartOrder()))
            if doubt is not None:
                note = NoteOrder(doubt_note(doubt))
                self._send(connection, (AGGREGATOR, note))
            return self._follow(connection)
        except KeyboardInterrupt:
            if self._status.get(AGGREGATOR) in ("ready", "over"):
                self._view.progress("Stopping: the aggregator finishes its records")
                self._inbox.close()  # handle no more messages, but send everything
                self._send(connection, (AGGREGATOR, messages.StopOrder()))
                self._await_aggregator(_STOP_TIMEOUT_SECONDS)
                self._read_records()
                self._write_last_energy()
            raise
        finally:
            self._inbox.close()
            connection.close()

    def _connect(self, broker: BrokerAccess) -> Connection:
        names = self._topics
        subscriptions = [names.status("+"), names.telemetry("+"), names.failure("+")]
        connection = Connection(broker, subscriptions, self._inbox.receive)
        try:
            connection.open()
        except ConnectionFailedError as error:
            hint = _NETWORK_HINT if self._spec.plan.traits.images else ""
            raise HostError(f"{error}{hint}{self._log_tail(BROKER)}") from error
        return connection

    def _send(self, connection: Connection, order: AddressedOrder) -> None:
        component, message = order
        try:
            payload = messages.encode(message)
        except MessageError as error:
            self._record_failure(f"an order to {component} could not be sent: {error}")
        else:
            connection.publish(self._topics.control(component), payload)

    def _hold_barrier(self, connection: Connection) -> None:
        """Wait until all living devices are ready. At the timeout, a quorum of ready devices suffices.
        Each device gets its CPU limit as soon as the device is ready. The kernel's files must then show
        that limit. Raises RunFailedError if too few devices are ready at the timeout, or at once if too
        many have ended."""
        start = self._spec.topology.start
        needed = max(1, math.ceil(start.quorum * len(self._awaited)))
        deadline = time.monotonic() + start.timeout
        for _ in self._ticks():
            living = self._awaited - self._exit_codes.keys()
            ready = {name for name in living - self._unmeasured if self._status.get(name) == "ready"}
            ready -= self._await_limits(ready, connection)
            if len(ready) > self._most_ready:
                self._most_ready = len(ready)
                self._view.progress(f"Ready: {len(ready)} of {quantity(len(self._awaited), 'device')}")
            late = time.monotonic() >= deadline
            # Absent devices measure their links now, too.
            measured = self._unmeasured <= self._exit_codes.keys()
            if self._status.get(AGGREGATOR) == "ready" and len(ready) >= needed:
                if late or (ready == living and measured):
                    for name in sorted(living & self._unmeasured):  # a limit would slow down measuring
                        if self._status.get(name) == "ready":
                            self._limit(name)
                    return
            elif len(living) < needed or AGGREGATOR in self._exit_codes:
                self._fail_early()
            elif late:
                self._fail_late(ready)

    def _await_limits(self, ready: set[str], connection: Connection) -> set[str]:
        """Return the devices of `ready` whose limits are not confirmed yet. Ask these devices to read
        their limits. Raises RunFailedError if the engine has set other limits."""
        now = time.monotonic()
        waiting = set()
        for name in sorted(ready):
            wrong = self._wrong_limits(name)
            if not wrong:
                continue
            waiting.add(name)
            read = self._limits.get(name)
            if read is not None and read.at > self._limited[name] + _LIMITS_TIMEOUT_SECONDS:
                raise RunFailedError(
                    f"the engine has set other limits for {name}'s container: {'; '.join(wrong)}. The "
                    "run does not start, because its devices would not be those of the topology. See "
                    "`testbed doctor`."
                )
            if now >= self._asked.get(name, 0.0) + _ASKING_INTERVAL_SECONDS:
                self._asked[name] = now
                self._send(connection, (name, messages.LimitsRequest(name)))
        return waiting

    def _wrong_limits(self, device: str) -> list[str]:
        """Return one text per limit that is not as requested, or one if the limits have not been read
        yet. The list is empty if no control group limits the device."""
        if (wanted := self._requested_limits.get(device)) is None:
            return []
        if (read := self._limits.get(device)) is None:
            return ["they have not been read yet"]
        return list(differences(wanted, read.limits))

    def _skip_earlier_records(self) -> None:
        """Pass records of the run's earlier segments to the view, without acting on them. Process the
        records of this segment.

        The records are read only when the aggregator is ready. Before that, an aggregator that resumes
        from a checkpoint removes all records after the checkpoint.
        """
        records = self._new_records()
        new = [one for one in _tail(records) if events.to_line(one) not in self._earlier_lines]
        past = records[: len(records) - len(new)]
        self._earlier_lines.clear()
        self._view.past(past)
        self._energy.resume(past)
        self._process_records(new)

    def _check_links(self, connection: Connection) -> str | None:
        """Measure links again that were measured wrong, while a host is busier than its plan. Return a
        sentence on links whose last measurement deviates more than a valid run allows; None if there are
        no such links.

        Raises RunFailedError if a rate deviates so much that the run must not start.
        """
        for count in itertools.count(1):
            found, rates = self._link_figures()
            links, shared = wrong_links(found), wrong_segments(rates)
            if not links and not shared:
                break
            work = self._other_work()
            seconds = pause(count, work)
            busy = "; ".join(one.text for one in work)
            if seconds is None:
                self._refuse_links(found, rates, f" in {quantity(count, 'measurement')} ({busy})")
                break
            why = "the host is busy" if any(one.is_busy for one in work) else "a host may be busy"
            again = f"{quantity(len(links) + len(shared), 'link')} again: {why} ({busy})"
            self._view.progress(f"Measuring {again}")
            self._note(f"measured {again}")
            self._measure_again(connection, seconds, links, shared)
        return link_doubt(found) or segment_doubt(rates)

    def _link_figures(self) -> tuple[Fidelity, tuple[SegmentFidelity, ...]]:
        """Devices that have not ended, and segments, by their last measurements."""
        dilation = self._spec.plan.dilation
        self._probed += (in_device_time(one, dilation) for one in self._probes.read() if "probe" in one)
        before_the_start = SegmentClock(0.0, begin=math.inf)
        wanted = [one for one in requested.devices(self._spec, ()) if one.device not in self._exit_codes]
        found = measure(wanted, self._probed, before_the_start, {})
        return found, segments.of_run(self._spec, (), SegmentClock(0.0, end=0.0))

    def _other_work(self) -> list[OtherWork]:
        """Work during the last measurement of links, on each host with devices."""
        self._sample_other_hosts()
        assert self._before_links is not None  # noqa: S101
        meter, now = self._runtime.meter, cpus.read_cpu_times()
        here = host_load.on_this_host(self._before_links, now, meter.groups(), os.cpu_count() or 1)
        others = self._other_hosts
        return [here, *(host_load.on_another_host(host, load) for host, load in others.items())]

    def _refuse_links(self, found: Fidelity, rates: tuple[SegmentFidelity, ...], measured: str) -> None:
        """`measured`: how often links were measured, and how busy hosts were. Raises RunFailedError."""
        why = link_doubt(found, FAILED_LINK_PERCENT, RATES) or segment_doubt(rates, FAILED_LINK_PERCENT)
        if why is not None:
            raise RunFailedError(
                f"{why}, as measured before the run clock started,{measured}. Request a link that this "
                "host can emulate, or try again when the host is less busy."
            )

    def _measure_again(
        self, connection: Connection, seconds: float, links: list[str], shared: list[str]
    ) -> None:
        """Measure the links of devices, then segments. Raises RunFailedError if too few devices are
        left."""
        until = time.monotonic() + seconds
        for _ in self._ticks():
            if time.monotonic() >= until:
                break
        self._sample_other_hosts()
        self._before_links = cpus.read_cpu_times()
        orders = self._runtime.measure_again([one for one in links if one not in self._exit_codes])
        for device, order in orders:
            self._unmeasured.add(device)
            self._limits.pop(device, None)  # read again when the limits are set again
            self._send(connection, (device, order))
        self._hold_barrier(connection)
        if shared:
            self._unmeasured |= set(shared)
            self._send(connection, (ROUTER, MeasureOrder(shared)))
            self._hold_barrier(connection)

    def _fail_early(self) -> None:
        names = sorted(self._exit_codes)
        raise RunFailedError(
            f"{', '.join(names)} ended before the run clock could start."
            f"{_hint(set(self._exit_codes.values()))}{self._log_tail(names[0])}"
        )

    def _fail_late(self, ready: set[str]) -> None:
        missing = ", ".join(sorted(self._awaited - ready)) or AGGREGATOR
        raise RunFailedError(
            f"{len(ready)} of {quantity(len(self._awaited), 'device')} ready after start.timeout = "
            f"{self._spec.topology.start.timeout:g} s; not ready: {missing}. See "
            f"{self._spec.directory.logs}, or give the fleet more time (start.timeout) or a quorum "
            "(start.quorum)."
        )

    def _follow(self, connection: Connection) -> events.RunEnded:
        until = math.inf
        for _ in self._ticks():
            self._read_records()
            if self.epoch is not None:  # before that, an action has no device time
                self._commands.serve(self._execute)
            if not self._is_over:
                self._player.play()
                for failure in self._returning.overdue(time.monotonic()):
                    self._record_failure(failure)
            self._orders += self._energy.orders(is_over=self._is_over)
            orders = self._orders.copy()
            self._orders.clear()  # not a new list: the scenario player appends to this one
            for order in orders:
                if self._postponed is not None and order[0] == AGGREGATOR:
                    self._postponed.append(order)
                else:
                    self._send(connection, order)
            self._view.refresh(time.monotonic() / self._dilation)
            if self._ended is not None:
                self._check_processes()  # now, as the aggregator ends in a moment, and then the devices
            if AGGREGATOR in self._exit_codes:
                until = min(until, time.monotonic() + _LAST_SECONDS)
                if self._devices <= self._exit_codes.keys() or time.monotonic() >= until:
                    break
        self._sample_other_hosts()
        self._read_records()
        if self._ended is not None and self.epoch is not None:
            self._record_lasting(self.epoch + self._ended.at * self._dilation)
        self._write_last_energy()
        if self._ended is None:
            raise RunFailedError(f"the aggregator ended before the run did.{self._log_tail(AGGREGATOR)}")
        if self._ended.reason == "no clients left":
            if user_code.is_user_code(self._spec.topology.task.name):
                self._await_devices(_END_TIMEOUT_SECONDS)
            raise RunFailedError(f"no clients left. See {self._spec.directory.logs}.")
        if self._ended.reason == "interrupted":  # not by this process, which would not be here
            raise RunFailedError(
                f"the aggregator was ended by a signal at {self._ended.at:.1f} s, which nobody had "
                f"ordered. To go on with the run: testbed up --resume {self._spec.directory.run}"
            )
        return self._ended

    def _ticks(self) -> Iterator[None]:
        """Yield several times per second. Between two yields, handle the inbox and check the
        processes."""
        supervise = lateness = 0.0
        look = time.monotonic() + _OTHER_HOSTS_INTERVAL_SECONDS
        with self._spec.directory.telemetry.open("a", encoding="utf-8", buffering=1) as telemetry:
            while True:
                for message in self._inbox.drain(0.0):
                    self._handle_message(message, telemetry.write)
                # After the end, this process's meters miss what the clients have used before it.
                for energy in () if self._was_over else self._runtime.meter.feature_telemetry():
                    self._handle_energy(energy, telemetry.write)
                if time.monotonic() >= supervise:
                    supervise = time.monotonic() + _SUPERVISION_INTERVAL_SECONDS
                    for sample in self._runtime.meter.telemetry():
                        telemetry.write(_line(sample))
                    for one in self._runtime.meter.disturbances():
                        self._disturbed(one)
                    self._check_processes()
                    self._check_stopped()
                    self._sample_host(lateness)
                    lateness = 0.0
                if time.monotonic() >= look:
                    look = time.monotonic() + _OTHER_HOSTS_INTERVAL_SECONDS
                    self._sample_other_hosts()
                    self._record_lasting(time.monotonic())
                yield
                asleep = time.monotonic()
                duration = max(0.0, min(_TICK_SECONDS, self._player.next_due - asleep))
                time.sleep(duration)
                awake = time.monotonic()
                lateness = max(lateness, awake - asleep - duration)
                if awake - asleep - duration >= STANDSTILL_SECONDS:
                    self._record_disruption(awake, asleep, "the controller stood still")

    def _sample_other_hosts(self) -> None:
        at = 0.0 if self.epoch is None else (time.monotonic() - self.epoch) / self._dilation
        for host, reading in self._runtime.meter.other_hosts(at, self._used).items():
            self._other_hosts[host] = reading.load
            if reading.load is not None:
                self.other_samples.setdefault(host, []).append(reading.load)
            off = reading.clock_uncertainty / self._dilation
            self.clocks[host] = max(off, self.clocks.get(host, 0.0))

    def _write_last_energy(self) -> None:
        """Write the energy of the devices up to the end of the run."""
        if self._ended is not None:
            with self._spec.directory.telemetry.open("a", encoding="utf-8") as telemetry:
                for sample in self._energy.last_samples(self._ended.at, self._ended_early):
                    telemetry.write(_line(sample))

    @property
    def feature_figures(self) -> tuple[FeatureFigures, ...]:
        figures = self._energy.comparison
        return () if figures is None else (figures,)

    def _sample_host(self, lateness: float) -> None:
        if self.epoch is not None and not self._is_over:
            self._energy.sample_host()
            sample = self._sampler.sample((time.monotonic() - self.epoch) / self._dilation, lateness)
            if sample is not None:
                self.host_samples.append(sample)

    def _handle_message(self, event: ReceivedMessage, write_telemetry: Callable[[str], object]) -> None:
        try:
            now = time.monotonic()
            if not self._rate_limit.admits(event.topic, now):
                raise MessageError("too many")
            match messages.decode(self._topics, event.topic, event.payload):
                case (
                    messages.UsageSample(at=at)
                    | messages.LinkProbe(at=at)
                    | messages.LimitsRead(at=at)
                    | messages.Disturbance(at=at)
                    | EnergySample(at=at)
                    | PowerSwitch(at=at)
                    | messages.NetworkProbe(at=at)
                    | messages.NetworkUse(at=at)
                ) if at > now:  # both clocks are the same
                    raise MessageError(f"at: {at:g} s is in the future")
                case messages.UsageSample() as sample:
                    self._used[sample.device] = sample.cpu
                    self._heard[sample.device] = now
                    write_telemetry(_line(sample))
                case EnergySample() | PowerSwitch() as energy:
                    self._handle_energy(energy, write_telemetry)
                case messages.LinkProbe(device, at) as probe:
                    # Otherwise it is a retained message, sent again.
                    if device in self._unmeasured and at > self._measured.get(device, -math.inf):
                        self._unmeasured.discard(device)
                        self._measured[device] = at
                        write_telemetry(_line(probe))
                        if self._status.get(device) == "ready":
                            self._limit(device)
                case messages.NetworkProbe() | messages.NetworkUse() as network:
                    write_telemetry(_line(network))
                    if isinstance(network, messages.NetworkProbe):
                        self._unmeasured -= {one.segment for one in network.segments}
                case messages.LimitsRead(device) as read:
                    self._limits[device] = read
                    write_telemetry(_line(read))
                case messages.Disturbance(device, _, _, reason) if reason == cut(device) and (
                    self._is_cut(device)
                ):
                    pass  # as ordered
                case messages.Disturbance() as found:
                    self._disturbed(found)
                case messages.Failure(component, reason):
                    if component == AGGREGATOR:  # which may never record it
                        self._view.progress(f"the aggregator: {reason}")
                    self._record_failure(f"{component}: {reason}")
                case messages.Status(component, state):
                    self._status[component] = state
                    self._was_over |= (component, state) == (AGGREGATOR, "over")
                    if (component, state) == (AGGREGATOR, "ready") and self._postponed is not None:
                        self._orders[:0] = self._postponed
                        self._postponed = None
                    is_measured = component not in self._unmeasured or self._connection is not None
                    if state == "ready" and component in self._devices and is_measured:
                        self._limit(component)
                case _:
                    raise MessageError("it is not for the controller")
        except MessageError as error:
            first = self._refusals.add(event.topic, error) == 1
            if first and event.topic.startswith(self._topics.failure("")):  # some action has failed
                self.failures.append(f"invalid message on {event.topic}: {error}")

    def _limit(self, device: str) -> None:
        self._runtime.limit(device)
        self._limited[device] = time.monotonic()

    def _handle_energy(
        self,
        message: EnergySample | PowerSwitch,
        write_telemetry: Callable[[str], object],
    ) -> None:
        self._orders += self._energy.take(message, is_over=self._was_over)
        if isinstance(message, EnergySample) and not self._was_over:
            write_telemetry(_line(message))

    def _record_failure(self, what: str) -> None:
        """The run continues, but is not valid."""
        self.failures.append(what)
        self._note(what)

    def _note(self, what: str) -> None:
        self._orders.append((AGGREGATOR, NoteOrder(what)))

    def _check_processes(self) -> None:
        """Check for ended processes.

        A device may end; if nobody ordered that, the run is not valid. If broker or aggregator ends
        while the run clock is running, the process is restarted. A run has at most `_MAX_RESTARTS`
        restarts. If the process cannot be restarted, the run ends.
        """
        self._record_exits()
        for name, code in self._runtime.exit_codes().items():
            if name in self._exit_codes:
                continue
            if code == user_code.FAILED:
                what, told = self._user_code_on(name), self._log_tail(name, _TRACEBACK_LINES)
                raise RunFailedError(f"{what} failed on {name}, so the run ends.{told}")
            if code == files.FULL_DISK and name == AGGREGATOR:
                raise RunFailedError(self._full_disk())
            if name in (BROKER, ROUTER, MPS) or (name == AGGREGATOR and code != 0):
                if self._start_again(name, code):
                    continue
                often = f", after {quantity(self._restarts, 'restart')}" if self._restarts else ""
                raise RunFailedError(
                    f"the {name} ended with exit code {code}{often}.{_hint({code})}"
                    f"{self._log_tail(name)}"
                )
            self._exit_codes[name] = code
            if not self._was_over:
                self._ended_early.add(name)
            if name in self._devices and self._ended is None:
                if code != 0:
                    self._view.progress(
                        f"{name} ended with exit code {code}; see its log.{_hint({code})}"
                    )
                if self.epoch is not None:
                    at = (time.monotonic() - self.epoch) / self._dilation
                    self._exits.append(f"{self._title(name)} ended at {at:.1f} s with exit code {code}")

    def _full_disk(self) -> str:
        directory = self._spec.directory
        told = self._log_tail(AGGREGATOR)
        resume = f", then go on: testbed up --resume {directory.run}"
        return (
            f"the aggregator could not write to {directory.path}{free_space(directory.path)}: make room "
            "there or raise the limit of the shell (ulimit -f)"
            f"{resume if self._spec.topology.durability in LOGGED else ''}; or run it again in a folder "
            f"on another disk (--runs).{told}"
        )

    def _record_exits(self) -> None:
        """Record as failures the devices that the check before found ended, unless the run is over by
        now: at the end of a run, devices may be seen to end before the aggregator's last message."""
        exits, self._exits = self._exits, []
        if self._ended is None and not self._is_over:
            for ended in exits:
                self._record_failure(f"{ended}, without an order")

    def _check_stopped(self) -> None:
        now, known = time.monotonic(), self._stopped_since
        self._stopped_since = {
            name: known.get(name, now) for name in self._runtime.meter.externally_stopped()
        }
        lasting = {
            f"{self._title(name)} stood still": since
            for name, since in self._stopped_since.items()
            if now - since >= STANDSTILL_SECONDS
        }
        self._hanging = {what: self._hanging.get(what, now) for what in self._find_hanging()}
        silent = {
            f"nothing was heard of {name}": since
            for name, since in self._heard.items()
            if name in self._real and now - since >= UNANSWERED_SECONDS and name not in self._exit_codes
        }
        for reason, since, is_over in self._disturbances.update(lasting | silent | self._hanging):
            if reason in lasting:
                self._view.progress(f"{reason} for {now - since:.0f} s: somebody has stopped it")
            elif reason in self._hanging:
                self._view.progress(reason)
            self._note_disturbance(now, since, reason, is_over=is_over)
        self._end_if_aggregator_hangs(now)

    def _find_hanging(self) -> Iterator[str]:
        """Yield a sentence for each process on this host that reports that own code hangs in it."""
        directory = self._spec.directory
        folders = {AGGREGATOR: directory.aggregator_state}
        folders |= {name: directory.disk(name) for name in self._devices}
        for name in folders.keys() & self._status.keys() - self._exit_codes.keys():
            is_held = self._states.get(name, DeviceState()).is_held
            what = None if is_held else read_hanging(folders[name], (str(directory.code), CODE))
            if what is not None:
                yield f"{name}: {what}"

    def _end_if_aggregator_hangs(self, now: float) -> None:
        """End the run if the aggregator's code holds Python's interpreter lock, and the run is late.
        Otherwise the aggregator itself gives up."""
        after, late = self._spec.topology.stop.build().after, math.inf
        if after is not None and self.epoch is not None:
            late = self.epoch + (after + LATE_SECONDS) * self._dilation
        for what, since in self._hanging.items():
            if what.startswith(f"{AGGREGATOR}:") and (now > late or now - since > LONGEST_SECONDS):
                self.failures.append(what)
                who = self._user_code_on(AGGREGATOR)
                raise RunFailedError(f"{who} failed on {what} for {now - since:.0f} s: the run ends.")

    def _disturbed(self, found: messages.Disturbance) -> None:
        self._note_disturbance(found.at, found.since, found.disturbance, is_over=found.is_over)

    def _note_disturbance(self, at: float, since: float, reason: str, *, is_over: bool) -> None:
        """Record a disturbance. One that is not over is recorded again until it is, at the latest with
        the end of the run."""
        if is_over:
            self._lasting.pop(reason, None)
        else:
            self._lasting[reason] = since
        self._record_disruption(at, since, reason)

    def _record_lasting(self, at: float) -> None:
        """Record what lasts at `at`, in seconds on the monotonic clock."""
        for reason, since in self._lasting.items():
            self._record_disruption(at, since, reason)

    def _record_disruption(self, at: float, since: float, reason: str) -> None:
        """Record a disruption from `since` to `at`, in seconds on the monotonic clock. Keep it for the
        verdict, too: the order does not arrive if broker or aggregator stands still until the end."""
        self._orders.append((AGGREGATOR, messages.DisruptOrder(at, since, reason)))
        if self.epoch is not None:
            begin, end = ((one - self.epoch) / self._dilation for one in (since, at))
            self.disruptions.append(events.Disrupted(end, max(0.0, begin), reason))

    def _is_cut(self, device: str) -> bool:
        """Whether an order has cut the device's link, or the link loses so many packets that the device
        may be silent for long."""
        state, planned = self._states.get(device, DeviceState()), self._planned[device].link
        link = (planned or AccessLink()).with_changes(state.link)
        return state.is_held or link.is_outage or link.loss > _LOSSY

    def _title(self, component: str) -> str:
        if component in self._devices:
            traits = self._spec.plan.traits
            return f"the {'container' if traits.images else 'client'} of {component}"
        relayed = component == ROUTER and not self._spec.plan.traits.images
        return "the relay" if relayed else f"the {component}"

    def _user_code_on(self, component: str) -> str:
        topology = self._spec.topology
        names = [topology.task.name]
        if component not in self._devices:
            selection = topology.named_selection
            names += [topology.rule.name, *([] if selection is None else [selection.name])]
        return " or ".join(filter(user_code.is_user_code, names)) or "own code"

    def _start_again(self, name: str, code: int) -> bool:
        """Restart broker or aggregator if the run can continue after the restart. Return whether the
        process was restarted.

        An aggregator without an input log is not restarted, because it would not know its last messages
        to the clients.
        """
        keeps_all = self._spec.topology.durability in LOGGED
        if self._connection is None or self.epoch is None or self._is_over:
            return False
        if name in (ROUTER, MPS) or (name == AGGREGATOR and not keeps_all):
            return False
        if self._restarts == _MAX_RESTARTS:
            return False
        self._restarts += 1
        self._postponed = self._postponed or []
        port = self._runtime.restart(name)
        if port is not None:
            self._connection.moved(port)
        at = (time.monotonic() - self.epoch) / self._dilation
        what = f"the {name} ended with exit code {code} at {at:.1f} s and was started again"
        if not keeps_all:
            what += "; updates in flight may be lost"
        self._record_failure(what)
        self._view.progress(what)
        return True

    def _read_records(self) -> None:
        self._process_records(self._new_records())

    def _process_records(self, records: Iterable[events.Record]) -> None:
        for record in records:
            self._view.record(record)
            self._returning.record(record, time.monotonic())
            self._energy.record(record)
            if isinstance(record, events.Acted) and isinstance(action := record.action, SetCpu):
                self._shares[record.device] = action.cpu
            if isinstance(record, events.Acted) and record.action is not None:
                state = self._states.get(record.device, DeviceState())
                self._states[record.device] = state.with_action(record.action)
            if isinstance(record, events.Acted) and record.source == AGGREGATOR:
                self._end_flooding_client(record.device)
            if isinstance(record, events.RunStarted):  # both clocks are this host's
                since = time.time() - record.wall_clock + record.at * self._dilation
                self.epoch = time.monotonic() - since
                self._orders += self._energy.start(self.epoch, record.at)
                if self._spec.plan.segments:
                    run_time = max(0.0, (time.monotonic() - self.epoch) / self._dilation)
                    self._orders.append((ROUTER, messages.NetworkStart(run_time)))
                self._player.start(self.epoch, record.at)
            if isinstance(record, events.RunEnded):
                self._ended = record

    def _end_flooding_client(self, device: str) -> None:
        """End the client of `device`, which floods the aggregator.

        Messages to the aggregator are held back until the aggregator reports the end of the flood.
        Messages sent during the flood could be lost.
        """
        self._postponed = self._postponed or []
        self._orders += self._runtime.act(device, Crash())
        self._record_failure(f"{device} sent far more than allowed, and its client was ended")

    @property
    def _is_over(self) -> bool:
        """Whether only the last evaluation of the run is missing. The devices then have nothing left to
        do."""
        return self._status.get(AGGREGATOR) == "over"

    def _execute(self, command: dict[str, Any]) -> None:
        """Raises BadInputError."""
        device, action = parse_command(command)
        if self._is_over:
            raise BadInputError(f"{self._spec.directory.run} is over except for its last evaluation.")
        if device in self._spec.plan.segments:
            self._player.execute(device, action)
            return
        if device not in self._devices:
            raise BadInputError(f"{self._spec.directory.run} has no device {device}.")
        self._energy.check(device, action)
        if isinstance(action, SetCpu):
            shares = (self._shares | {device: action.cpu}).values()
            why = self._spec.plan.too_little(action.cpu) or self._spec.plan.too_much(shares)
            if why is not None:
                raise BadInputError(f"{device} cannot have {action.cpu:g} cpu: {why}.")
        self._player.execute(device, action)

    def _await_devices(self, seconds: float) -> None:
        """A device ends after its client. Raises RunFailedError if the user's own code failed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._devices <= self._exit_codes.keys():
            time.sleep(_TICK_SECONDS)
            self._check_processes()

    def _new_records(self) -> list[events.Record]:
        return _read(self._follower)

    def _await_aggregator(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and AGGREGATOR not in self._runtime.exit_codes():
            time.sleep(_TICK_SECONDS)

    def _log_tail(self, name: str, lines: int = 12) -> str:
        """The runtime is stopped first, because that saves the logs."""
        try:
            self._runtime.stop()
        except HostError as error:  # report it beside the message, not instead of it
            self._report_left(error)
        return self._spec.directory.log_tail(name, lines)


def _line(sample: messages.Telemetry | messages.GpuSample) -> str:
    return messages.encode(sample).decode() + "\n"


def _hint(codes: set[int]) -> str:
    """The kernel kills processes (exit code 137 or -9) when memory runs out."""
    return " Killed: perhaps it needs more memory." if codes & {137, -9} else ""

"""Controller of one run: runtime, broker, clock and files around `ControllerCore`. It starts the
runtime, follows the run, and takes it down.

The controller takes no part in the learning. Once the run clock has started, aggregator and clients need
nothing from the controller.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Never, TextIO, assert_never

from agents import events
from agents.config import BrokerAccess
from agents.disturbances import STANDSTILL_SECONDS, read_hanging
from agents.mqtt.topics import AGGREGATOR
from agents.mqtt.transport import Connection, ConnectionFailedError, Inbox, ReceivedMessage
from agents.texts import quantity
from agents.wire import messages
from testbed.broker import BROKER
from testbed.errors import BadInputError, HostError, RunFailedError
from testbed.fidelity.validity import wrong_links
from testbed.host.processes import uninterrupted
from testbed.plan.agent_configs import CODE, RunSpec
from testbed.run import inputs
from testbed.run.core import ControllerCore
from testbed.run.host_watch import HostWatch
from testbed.run.inputs import ActionDone, ControllerInput, ControllerPhase
from testbed.rundir.live_files import JUST_NOW, CommandFolder, RecordFollower, Samples
from testbed.runtimes import Runtime
from testbed.segments.measured import wrong_segments
from testbed.view import View

_TICK_SECONDS = 0.1
_SUPERVISION_INTERVAL_SECONDS = 1.0
_OTHER_HOSTS_INTERVAL_SECONDS = 10.0
"""Seconds between two samples of clock and load."""
_INBOX_BYTES = 8 * 2**20
"""Bytes that wait to be handled."""
_NETWORK_HINT = (
    ". If testbed runs in a container, give that container the host's network: --network host"
)


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
        self._spec, self._runtime, self._view = spec, runtime, view
        self.core = ControllerCore(spec)
        self.hosts = HostWatch(spec, runtime.meter)
        self.timings = dict.fromkeys(("launch", "ready", "down"), 0.0)
        """Seconds of wall time: until every process or container was started, from then until every
        client was ready, and from the end of the run until everything was removed."""
        self._inbox: Inbox[Never] = Inbox(_INBOX_BYTES)
        self._connection: Connection | None = None
        self._telemetry: TextIO | None = None
        self._commands = CommandFolder(spec.directory.orders)
        self._follower = RecordFollower(spec.directory.events)
        self._earlier_lines: set[str] = set()
        """Records of earlier legs that might be of this one, as lines."""
        self._began = 0.0
        self._supervise = self._look = self._lateness = 0.0
        """Times in seconds, on the monotonic clock, of the next supervision and of the next look at
        other hosts; and the largest lateness of a tick since the last supervision."""
        self._ended: events.RunEnded | None = None

    def run(self) -> events.RunEnded:
        """Run to the end, then remove everything. The removal also happens after an error or Ctrl-C.
        Raises RunFailedError or HostError."""
        try:
            ended = self._run()
        except BaseException as error:
            if isinstance(error, HostError) and self.core.run.epoch is not None:
                # For example a node that left: the verdict names it.
                self.core.run.failures.insert(0, str(error))
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
            self.timings["down"] = down = time.monotonic() - begin
            self._view.progress(f"Everything removed in {down:.1f} s")

    def _report_left(self, error: HostError) -> None:
        run = self._spec.directory.run
        self._view.progress(f"Not everything could be removed ({error}). Try: testbed down {run}")

    def _run(self) -> events.RunEnded:
        plan = self._spec.plan
        fleet = f"{quantity(len(plan.devices), 'device')} ({plan.runtime})"
        self._view.progress(f"Starting broker, aggregator and {fleet}")
        self._began = time.monotonic()
        measures_links = any(not device.as_shaped.is_direct for device in plan.devices)
        if measures_links:
            self.hosts.begin_links()
        latest = RecordFollower(self._follower.path, JUST_NOW)
        self._earlier_lines = {*map(events.to_line, _tail(_read(latest)))}
        broker = self._runtime.start()
        self.timings["launch"] = time.monotonic() - self._began
        self._check_exits()
        self._connection = connection = self._connect(broker)
        try:
            with self._spec.directory.telemetry.open("a", encoding="utf-8", buffering=1) as telemetry:
                self._telemetry = telemetry
                if measures_links:
                    self._sample_other_hosts()
                return self._follow()
        finally:
            self._inbox.close()
            connection.close()

    def _connect(self, broker: BrokerAccess) -> Connection:
        names = self.core.run.topics
        subscriptions = [names.status("+"), names.telemetry("+"), names.failure("+")]
        connection = Connection(broker, subscriptions, self._inbox.receive)
        try:
            connection.open()
        except ConnectionFailedError as error:
            hint = _NETWORK_HINT if self._spec.plan.traits.images else ""
            raise HostError(f"{error}{hint}{self._log_tail(BROKER)}") from error
        return connection

    def _follow(self) -> events.RunEnded:
        try:
            self._handle(inputs.Connected(time.monotonic()))
            while self._ended is None:
                self._tick()
                if self._ended is None:
                    self._sleep()
            return self._ended
        except KeyboardInterrupt:
            self._inbox.close()  # handle no more messages, but send everything
            self._handle(inputs.Interrupted(time.monotonic()))
            raise

    def _tick(self) -> None:
        run, meter, now = self.core.run, self._runtime.meter, time.monotonic()
        for message in self._inbox.drain(0.0):
            self._receive(message)
        # After the end, this process's meters miss what the clients have used before it.
        if not run.was_over and (telemetry := meter.feature_telemetry()):
            self._handle(inputs.Metered(time.monotonic(), telemetry))
        if now >= self._supervise:
            self._supervise = now + _SUPERVISION_INTERVAL_SECONDS
            samples, disturbances = meter.telemetry(), meter.disturbances()
            self._handle(inputs.Metered(time.monotonic(), disturbances, samples))
            self._check_exits()
            self._watch_processes()
            if run.epoch is not None and not run.is_over:
                self.hosts.sample(run.device_time(time.monotonic()), self._lateness)
            self._lateness = 0.0
        if now >= self._look:
            self._look = now + _OTHER_HOSTS_INTERVAL_SECONDS
            self._sample_other_hosts()
        if run.has_started:
            self._read_records()
            if run.epoch is not None:  # before that, an action has no device time
                self._commands.serve(self._execute)
        self._handle(inputs.Tick(time.monotonic()))
        if run.ended is not None:
            self._check_exits()  # now, as the aggregator ends in a moment, and then the devices
        self._handle(inputs.TickOver(time.monotonic()))
        if run.has_started:
            self._view.refresh(time.monotonic() / run.dilation)

    def _sleep(self) -> None:
        asleep = time.monotonic()
        duration = max(0.0, min(_TICK_SECONDS, self.core.next_due - asleep))
        time.sleep(duration)
        awake = time.monotonic()
        lateness = awake - asleep - duration
        self._lateness = max(self._lateness, lateness)
        if lateness >= STANDSTILL_SECONDS:
            self._handle(inputs.StoodStill(awake, asleep))

    def _receive(self, message: ReceivedMessage) -> None:
        self._handle(inputs.MessageArrived(time.monotonic(), message.topic, message.payload))

    def _check_exits(self) -> None:
        codes = self._runtime.exit_codes()
        self._handle(inputs.ProcessesEnded(time.monotonic(), codes))

    def _watch_processes(self) -> None:
        directory, hanging = self._spec.directory, {}
        for name in self.core.supervision.watched():
            folder = directory.aggregator_state if name == AGGREGATOR else directory.disk(name)
            if (what := read_hanging(folder, (str(directory.code), CODE))) is not None:
                hanging[name] = what
        stopped = self._runtime.meter.externally_stopped()
        self._handle(inputs.ProcessesWatched(time.monotonic(), stopped, hanging))

    def _sample_other_hosts(self) -> None:
        at = self.core.run.device_time(time.monotonic())
        self.hosts.sample_others(at, self.core.supervision.cpu_seconds)

    def _execute(self, command: dict[str, Any]) -> None:
        """Raises BadInputError."""
        self._handle(inputs.CommandGiven(time.monotonic(), command))

    def _read_records(self) -> None:
        for record in _read(self._follower):
            self._pass_record(record)

    def _pass_record(self, record: events.Record) -> None:
        self._view.record(record)
        self._handle(inputs.RecordRead(time.monotonic(), time.time(), record))

    def _pass_earlier_records(self) -> None:
        """Pass records of the run's earlier legs, too, but not to act on them.

        The records are read only when the aggregator is ready. Before that, an aggregator that resumes
        from a checkpoint removes all records after the checkpoint.
        """
        records = _read(self._follower)
        new = [one for one in _tail(records) if events.to_line(one) not in self._earlier_lines]
        past = records[: len(records) - len(new)]
        self._earlier_lines.clear()
        self._view.past(past)
        samples = Samples(self._spec.directory.telemetry)
        self._handle(inputs.EarlierRecords(time.monotonic(), past, samples))
        for record in new:
            self._pass_record(record)

    def _handle(self, event: ControllerInput) -> None:
        """Pass `event` to the core and carry out its actions."""
        for action in self.core.handle(event):
            self._carry_out(action)

    def _carry_out(self, action: inputs.ControllerAction) -> None:
        runtime = self._runtime
        match action:
            case inputs.Publish(topic, payload):
                if self._connection is not None:
                    self._connection.publish(topic, payload)
            case inputs.Show(text):
                self._view.progress(text)
            case inputs.WriteSample(line):
                if self._telemetry is not None:
                    self._telemetry.write(line)
            case inputs.Act():
                self._act(action)
            case inputs.ApplyLimit(device):
                runtime.limit(device)
                self._handle(ActionDone(time.monotonic(), action))
            case inputs.Obey(order):
                self._handle(ActionDone(time.monotonic(), action, runtime.meter.obey(order)))
            case inputs.StartAgain(component):
                port = runtime.restart(component)
                if port is not None and self._connection is not None:
                    self._connection.moved(port)
                self._handle(ActionDone(time.monotonic(), action))
            case inputs.ReadLinks(is_first):
                if is_first:
                    self._pass_earlier_records()
                self._read_links()
            case inputs.MeasureAgain(devices):
                self._sample_other_hosts()
                self.hosts.begin_links()
                orders = runtime.measure_again(devices)
                self._handle(ActionDone(time.monotonic(), action, orders))
            case inputs.BeginRun():
                self._begin_run()
                self._handle(ActionDone(time.monotonic(), action))
            case inputs.Refuse(reason):
                raise BadInputError(reason)
            case inputs.ReadLastRecords(patience):
                self._await_aggregator(patience)
                if self.core.run.phase is not ControllerPhase.INTERRUPTED:
                    self._sample_other_hosts()
                self._read_records()
                self._handle(inputs.LastRecordsRead(time.monotonic()))
            case inputs.EndRun(ended):
                self._ended = ended
            case inputs.FailRun():
                self._await_devices(action.patience)
                told = "" if action.log_of is None else self._log_tail(action.log_of, action.log_lines)
                raise RunFailedError(f"{action.reason}{told}")
            case _:
                assert_never(action)

    def _act(self, act: inputs.Act) -> None:
        """Raises BadInputError for what the scenario has not asked for."""
        orders, failure = list[messages.AddressedOrder](), None
        try:
            orders = self._runtime.act(act.device, act.action)
        except BadInputError as error:
            if act.source != "scenario":
                raise
            failure = str(error)
        self._handle(ActionDone(time.monotonic(), act, orders, failure))

    def _read_links(self) -> None:
        found, rates = self.hosts.link_figures(self.core.run.exit_codes.keys())
        links, shared = wrong_links(found), wrong_segments(rates)
        work = []
        if links or shared:
            self._sample_other_hosts()
            work = self.hosts.other_work()
        self._handle(inputs.LinksRead(time.monotonic(), found, rates, links, shared, work))

    def _begin_run(self) -> None:
        launch = self.timings["launch"]
        self.timings["ready"] = ready = time.monotonic() - self._began - launch
        self._view.progress(
            f"Started in {launch:.1f} s, ready after {ready:.1f} s more; the run clock starts"
        )
        self._runtime.begin()
        self.hosts.begin_run(self.core.supervision.cpu_seconds)
        self._look = time.monotonic() + _OTHER_HOSTS_INTERVAL_SECONDS

    def _await_devices(self, seconds: float) -> None:
        """A device ends after its client. Raises RunFailedError if the user's own code failed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.core.have_all_ended:
            time.sleep(_TICK_SECONDS)
            self._check_exits()

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

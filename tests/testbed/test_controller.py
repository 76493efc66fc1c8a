"""The controller with a real broker and stand-ins for the agents that do not do what they should."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from agents import events, user_code
from agents.config import AccessLink, BrokerAccess, Segment
from agents.device_actions import Action, Crash, Restart, SetLink
from agents.disturbances import HangingFile
from agents.fields import NO_LIMIT
from agents.mqtt.topics import Topics
from agents.mqtt.transport import Connection, ReceivedMessage
from agents.wire.messages import AddressedOrder, DeviceOrder, MeasureOrder, NoteOrder
from testbed.errors import BadInputError, HostError, RunFailedError
from testbed.fidelity import host_load
from testbed.fidelity.host_load import OtherWork
from testbed.fidelity.validity import doubt_note
from testbed.host.processes import interrupting
from testbed.plan.agent_configs import RunSpec
from testbed.run import inputs, live_runs
from testbed.run.controller import Controller
from testbed.run.core import ControllerCore
from testbed.run.host_watch import HostWatch
from testbed.run.inputs import ControllerPhase
from testbed.run.up import judge
from testbed.rundir.live_files import Samples
from testbed.runtimes import LiveRun, Meter
from testbed.runtimes.process.runtime import ProcessRuntime, Programs
from testbed.view import View
from tests.testbed.test_process_runtime import SLEEP, of, python, spec
from tests.waiting import eventually

FAIL = "import sys; sys.exit('it broke')"
OWN = f"import sys; sys.stderr.write('a mistake'); sys.exit({user_code.FAILED})"


class Asked(Connection):
    """A connection to devices that read limits as `limits` has them, when they are asked to."""

    def __init__(self, controller: Controller, names: Topics, limits: dict[str, Any]) -> None:
        self._controller, self._names, self._limits = controller, names, limits

    def publish(self, topic: str, payload: Any, *, retain: bool = False) -> None:
        name = json.loads(payload).get("device")
        if name is None:  # for the aggregator
            return
        assert topic == self._names.control(name)
        read = {"device": name, "at": time.monotonic(), "limits": self._limits}
        answer = ReceivedMessage(self._names.telemetry(name), json.dumps(read).encode(), 0)
        self._controller._inbox.receive(answer)


def hold_barrier(
    controller: Controller, connection: Connection, until: Callable[[Controller], bool] | None = None
) -> None:
    """Tick until the run clock starts, or until `until`."""
    controller._connection = connection
    with controller._spec.directory.telemetry.open("a", buffering=1) as telemetry:
        controller._telemetry = telemetry
        controller._handle(inputs.Connected(time.monotonic()))
        while not (until or (lambda one: one.core.run.has_started))(controller):
            controller._tick()
            controller._sleep()


def connected(run: RunSpec, epoch: float | None = None) -> ControllerCore:
    """A core whose run has begun at `epoch`; None if it waits for the devices."""
    core = ControllerCore(run)
    core.handle(inputs.Connected(0.0))
    if epoch is not None:
        core.run.phase, core.run.epoch = ControllerPhase.RUNNING, epoch
    return core


def receive(core: ControllerCore, topic: str, payload: bytes, at: float | None = None) -> list[str]:
    """Pass a message; return the lines of telemetry that are to be written."""
    actions = core.handle(inputs.MessageArrived(time.monotonic() if at is None else at, topic, payload))
    core.validate()
    return [action.line for action in actions if isinstance(action, inputs.WriteSample)]


@dataclass
class Lines(View):
    """A view that remembers what it was told."""

    lines: list[str] = field(default_factory=list)

    def progress(self, message: str) -> None:
        self.lines.append(message)


AS_REQUESTED = {
    "quota": 5000,
    "period": 50_000,
    "shares": 1000,
    "cpus": "1",
    "memory": 2**29,
    "swap": 0,
}
"""Limits of a device with a tenth of a core."""


@pytest.mark.parametrize(
    ("aggregator", "client", "said"),
    [
        (SLEEP, FAIL, r"(?s)d-\d.* ended before the run clock could start.*d-\d\.log:\n *it broke"),
        (SLEEP, "import os; os.kill(os.getpid(), 9)", "perhaps it needs more memory"),
        (FAIL, SLEEP, r"(?s)the aggregator ended with exit code 1.*aggregator\.log:\n *it broke"),
        ("", SLEEP, "aggregator ended before the run clock could start"),
        (SLEEP, OWN, r"(?s)own code failed on d-\d, so the run ends\..*d-\d\.log:\n *a mistake$"),
        (OWN, SLEEP, r"(?s)own code failed on aggregator, so the run ends\..*\n *a mistake$"),
    ],
    ids=[
        *("device fails", "device is killed", "aggregator fails", "aggregator leaves"),
        *("own code fails in a device", "own code fails in the aggregator"),
    ],
)
def test_part_that_dies_before_the_start_is_reported_at_once(
    aggregator: str, client: str, said: str, tmp_path: Path
) -> None:
    """After the timeout for the start, the message would be another."""
    run = spec(tmp_path)
    programs = Programs(aggregator=python(aggregator), client=python(client))
    with pytest.raises(RunFailedError, match=said):
        Controller(run, ProcessRuntime(run, programs), Lines()).run()
    assert of(run) == []


def test_sigterm_during_startup_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM to this process, as `testbed down` sends it, while the run waits for its devices."""
    run = spec(tmp_path)
    programs = Programs(aggregator=python(SLEEP), client=python(SLEEP))
    main = threading.get_ident()

    def waits_for_devices() -> bool:
        stack = (frame for frame, _ in traceback.walk_stack(sys._current_frames()[main]))
        return any(frame.f_code is Controller._sleep.__code__ for frame in stack)

    def terminate() -> None:
        eventually(waits_for_devices)
        assert of(run)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    with interrupting():
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            Controller(run, ProcessRuntime(run, programs), Lines()).run()
    assert of(run) == []


def test_directory_named_by_a_label_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process marked with a run but no directory must not cost anybody the `work/` that is here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "work").mkdir()
    for directory in (None, tmp_path):
        live_runs.take_down(LiveRun(f"no-{tmp_path.name}", "process", 1, directory))
    assert (tmp_path / "work").is_dir()


class IdleMeter(Meter):
    """A meter that shows nothing of a run."""

    def externally_stopped(self) -> set[str]:
        return set()

    def server_pids(self) -> list[int]:
        return []

    def device_cpu_seconds(self) -> float | None:
        return None


class StoppedMeter(IdleMeter):
    """A meter that shows that somebody has stopped the broker."""

    def externally_stopped(self) -> set[str]:
        return {"broker"}


class Idle:
    """A runtime whose components say nothing by themselves."""

    meter: Meter = IdleMeter()

    def __init__(self) -> None:
        self.done: list[tuple[str, Action]] = []

    def start(self) -> BrokerAccess:
        return BrokerAccess("localhost", 0, "", "")

    def limit(self, device: str) -> None: ...
    def stop(self) -> None: ...

    def act(self, device: str, action: Action) -> list[AddressedOrder]:
        self.done.append((device, action))
        return []

    def exit_codes(self) -> dict[str, int]:
        return {}

    def restart(self, component: str) -> int | None:
        return None

    def measure_again(self, devices: Sequence[str]) -> list[AddressedOrder]:
        return [(name, MeasureOrder([name])) for name in devices]

    def begin(self) -> None: ...


class Stubborn(Idle):
    """A runtime that cannot remove what it has started."""

    def start(self) -> BrokerAccess:
        raise RunFailedError("the broker ended as soon as it was started")

    def stop(self) -> None:
        raise HostError("the Docker engine could not remove the containers: read timed out")


def test_removal_error_does_not_hide_the_cause(tmp_path: Path) -> None:
    run, lines = spec(tmp_path), Lines()
    with pytest.raises(RunFailedError, match="the broker ended as soon as"):
        Controller(run, Stubborn(), lines).run()
    assert f"read timed out). Try: testbed down {run.directory.run}" in lines.lines[-1]
    assert not any("Everything removed" in line for line in lines.lines)


def test_log_of_a_failed_process_is_shown_even_if_removal_fails(tmp_path: Path) -> None:
    run = spec(tmp_path)
    run.directory.log("aggregator").write_text("it broke\n")
    controller = Controller(run, Stubborn(), Lines())
    assert controller._log_tail("aggregator").endswith("it broke")


def test_failed_order_is_noted_and_makes_the_run_not_valid(tmp_path: Path) -> None:
    run = spec(tmp_path)
    core, names = connected(run), Topics(run.directory.run)
    assert receive(core, names.failure("d-1"), b"`tc qdisc` failed") == []
    told = "d-1: `tc qdisc` failed"
    assert core.run.failures == [told]
    assert core.run.orders == [("aggregator", NoteOrder(told))]


def test_invalid_message_is_noted_and_ignored(tmp_path: Path) -> None:
    run = spec(tmp_path)
    core, names = connected(run), Topics(run.directory.run)
    of_another = b'{"device": "d-2", "at": 1.0, "cpu": 1.0, "memory": 1}'
    of_the_future = b'{"device": "d-1", "at": %f, "cpu": 1.0, "memory": 1}' % (time.monotonic() + 60)
    for topic, payload in (
        (names.telemetry("d-1"), b"[" * 60_000),
        (names.telemetry("d-1"), of_another),
        (names.telemetry("d-1"), of_the_future),
        (names.status("d-1"), b"\xff"),
        (names.request("d-1"), b"stop"),
    ):
        assert receive(core, topic, payload) == []
    assert core.run.status == {}
    assert core.run.failures == []
    notes = [note.message for _, note in core.run.orders if isinstance(note, NoteOrder)]
    assert len(notes) == 5
    assert notes[1].endswith("device: found d-2, expected d-1 as in the topic")
    for _ in range(100):
        receive(core, names.status("d-1"), b"?")
    said = {topic: count for topic, count in core._refusals.counts.items() if count > 1}
    assert said == {names.telemetry("d-1"): 3, names.status("d-1"): 101}
    assert len(core.run.orders) == 3 + 22 + 1  # of 101 the first 20, the 21st, the 100th
    assert core._refusals.count == 105


def test_excess_telemetry_of_a_device_is_dropped_without_affecting_others(tmp_path: Path) -> None:
    run = spec(tmp_path)
    core, names = connected(run), Topics(run.directory.run)
    written: list[str] = []
    sample = b'{"device": "%s", "at": 1.0, "cpu": 1.0, "memory": 1}'
    for _ in range(1000):
        written += receive(core, names.telemetry("d-1"), sample % b"d-1")
        receive(core, names.failure("d-1"), b"x" * 4096)
        receive(core, names.failure("d-1"), b"x" * 5000)
    written += receive(core, names.telemetry("d-2"), sample % b"d-2")
    assert 100 < len(written) < 200
    assert '"d-2"' in written[-1]
    assert len(core.run.failures) + len(core.run.orders) < 400


def test_flooding_client_is_killed_and_the_aggregator_notified_afterwards(tmp_path: Path) -> None:
    run = spec(tmp_path)
    core, names = connected(run, epoch=0.0), Topics(run.directory.run)

    def crash(source: Literal["hand", "aggregator"]) -> Sequence[inputs.ControllerAction]:
        record = events.Acted(1.0, "d-1", source, 0.0, {"action": "crash"})
        return core.handle(inputs.RecordRead(1.0, 1.0, record))

    assert crash("hand") == []
    (ended,) = crash("aggregator")
    assert ended == inputs.Act("d-1", Crash(), None)
    core.handle(inputs.ActionDone(1.0, inputs.Act("d-1", Crash(), None)))
    told = "d-1 sent far more than allowed, and its client was ended"
    assert core.run.failures == [told]
    assert core.handle(inputs.TickOver(1.1)) == []
    assert core.run.postponed == [("aggregator", NoteOrder(told))]
    receive(core, names.status("aggregator"), b"ready")
    assert core.run.postponed is None
    assert core.run.orders == [("aggregator", NoteOrder(told))]


def test_unreadable_failure_makes_the_run_not_valid(tmp_path: Path) -> None:
    run = spec(tmp_path)
    core, names = connected(run), Topics(run.directory.run)
    receive(core, names.failure("d-1"), b"\xff")
    assert len(core.run.failures) == len(core.run.orders) == 1


def test_order_that_cannot_be_sent_is_a_failure(tmp_path: Path) -> None:
    core = connected(spec(tmp_path), epoch=0.0)
    core.run.order("d-1", DeviceOrder("d-1", SetLink({"rtt": 1e12})))
    assert core.handle(inputs.TickOver(1.0)) == []
    (failure,) = core.run.failures
    assert failure.startswith("an order to d-1 could not be sent: ")
    assert ".link.rtt`" in failure


def test_share_below_a_containers_minimum_is_refused_during_a_run(tmp_path: Path) -> None:
    run = spec(tmp_path)
    core = connected(replace(run, plan=replace(run.plan, runtime="docker")), epoch=0.0)
    (refused,) = core.handle(inputs.CommandGiven(1.0, {"device": "d-1", "action": "set", "cpu": 0.0005}))
    assert isinstance(refused, inputs.Refuse)
    assert "cannot have 0.0005 cpu: a container has at least 0.001" in refused.reason


def test_users_command_that_the_runtime_cannot_do_is_answered(tmp_path: Path) -> None:
    """The scenario's is recorded as a failure, and the run goes on."""

    class Refusing(Idle):
        def act(self, device: str, action: Action) -> list[AddressedOrder]:
            raise BadInputError(f"{device} has ended")

    controller = Controller(spec(tmp_path), Refusing(), Lines())
    controller.core.run.phase, controller.core.run.epoch = ControllerPhase.RUNNING, 0.0
    with pytest.raises(BadInputError, match="d-1 has ended"):
        controller._execute({"device": "d-1", "action": "restart"})
    with pytest.raises(BadInputError, match="has no device d-9"):
        controller._execute({"device": "d-9", "action": "restart"})
    controller._carry_out(inputs.Act("d-1", Restart(), "scenario", due=1.0))
    assert controller.core.run.failures == ["d-1 has ended"]


def watched(
    at: float, *stopped: str, hanging: Mapping[str, str] | None = None
) -> inputs.ProcessesWatched:
    return inputs.ProcessesWatched(at, {*stopped}, hanging or {})


def judged(controller: Controller) -> tuple[str, ...]:
    """Reasons why the run is not valid."""
    epoch = controller.core.run.epoch
    assert epoch is not None
    judgement, _ = judge(controller._spec, controller, epoch)
    return tuple(judgement.validity.reasons)


def running(run: RunSpec, end: float, view: View | None = None) -> Controller:
    """A controller of a run that has begun at 100 s and will end after `end` seconds."""
    controller = Controller(run, Idle(), view or Lines())
    ended = events.RunStarted(0.0, 0.0, (), ()), events.RunEnded(end, "after", 0, 0)
    run.directory.events.write_text("".join([events.to_line(record) for record in ended]))
    controller.core.run.phase, controller.core.run.epoch = ControllerPhase.RUNNING, 100.0
    return controller


def end(controller: Controller, at: float) -> None:
    """Let the aggregator record the end of the run, at device time `at` in seconds."""
    record = events.RunEnded(at, "after", 0, 0)
    controller.core.handle(inputs.RecordRead(100.0 + at, 0.0, record))
    controller.core.handle(inputs.LastRecordsRead(100.0 + at))


def test_broker_that_stands_still_until_the_end_makes_the_run_not_valid(tmp_path: Path) -> None:
    """The order to record it gets no further than the broker."""
    controller = running(spec(tmp_path), 12.0)
    for at in (104.0, 106.9, 107.1, 120.0):
        controller.core.handle(watched(at, "broker"))
    assert "the broker stood still from 4.0 to 7.1 s" in judged(controller)
    end(controller, 12.0)
    assert "the broker stood still from 4.0 to 12.0 s" in judged(controller)
    controller.core.run.epoch = 50.0  # a disruption after the end of the run does not count
    controller.core.run.disruptions.clear()
    controller.core.supervision.record_disruption(70.0, 65.0, "the broker stood still")
    assert not judged(controller)


def test_device_that_is_silent_until_the_end_makes_the_run_not_valid(tmp_path: Path) -> None:
    """A real device whose program hangs; and a link that stood still when its init was last heard of."""
    run = spec(tmp_path)
    controller, names = running(run, 30.0), Topics(run.directory.run)
    core = controller.core
    core.supervision._real = {"d-1"}
    sample = b'{"device": "d-1", "at": 101.0, "cpu": 1.0, "memory": 1}'
    stuck = (
        b'{"device": "d-2", "at": 103.0, "since": 102.0, "disturbance": "a link stood still", '
        b'"is_over": false}'
    )
    for name, payload in (("d-1", sample), ("d-2", stuck)):
        receive(core, names.telemetry(name), payload, at=104.0)
    core.handle(watched(113.0))
    end(controller, 30.0)
    assert "nothing was heard of d-1 from 4.0 to 30.0 s" in judged(controller)
    assert "a link stood still from 2.0 to 30.0 s" in judged(controller)


@pytest.mark.parametrize(
    ("component", "more", "ends"),
    [
        ("aggregator", "", 142.0),  # 30 s after the end that `stop` asks for
        ("aggregator", "stop: {updates: 9}", 405.0),  # after 5 minutes
        ("d-1", "", None),
    ],
)
def test_own_code_that_holds_the_interpreter_lock_is_named(
    component: str, more: str, ends: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the run if it is the aggregator's, which cannot give up itself."""
    run, view = spec(tmp_path, more=more), Lines()
    controller, directory = running(run, 10.0, view), run.directory
    controller.core.run.status = {component: "ready"}
    folder = directory.aggregator_state if component == "aggregator" else directory.disk(component)
    folder.mkdir(parents=True)
    told = f'Timeout (0:00:05)!\nThread 1:\n  File "{directory.code}/own.py", line 3 in update\n'
    HangingFile(folder).write(2 * told)
    for at in (104.0, 105.0, 111.0, *([] if ends is None else [ends - 3])):
        monkeypatch.setattr(time, "monotonic", lambda at=at: at)
        controller._watch_processes()
    what = f"{component}: own code has not returned from own.py, line 3 (update)"
    assert view.lines == [what]
    if ends is not None:
        monkeypatch.setattr(time, "monotonic", lambda: ends)
        with pytest.raises(RunFailedError, match=re.escape(what)):
            controller._watch_processes()
    end(controller, 10.0)
    assert f"{what} from 4.0 to 10.0 s" in judged(controller)


def test_no_actions_are_done_while_the_last_evaluation_is_awaited(tmp_path: Path) -> None:
    run = spec(tmp_path)
    core, names = connected(run, epoch=0.0), Topics(run.directory.run)
    receive(core, names.status("aggregator"), b"over")
    (refused,) = core.handle(inputs.CommandGiven(1.0, {"device": "d-1", "action": "crash"}))
    assert isinstance(refused, inputs.Refuse)
    assert "is over except for its last evaluation" in refused.reason


class Ending(Idle):
    """A runtime whose aggregator has ended at the second look, and its devices at the third."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = [{}, {"aggregator": 0}, {"aggregator": 0, "d-1": 0, "d-2": 0}]

    def exit_codes(self) -> dict[str, int]:
        return self.codes.pop(0)


def test_run_ends_as_soon_as_its_processes_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise processes are looked at at intervals."""
    monkeypatch.setattr("testbed.run.controller._SUPERVISION_INTERVAL_SECONDS", 1000.0)
    monkeypatch.setattr("testbed.run.core._LAST_SECONDS", 1000.0)
    controller = Controller(spec(tmp_path), Ending(), Lines())
    run = controller.core.run
    run.phase, run.epoch = ControllerPhase.ENDED, 0.0
    run.ended = events.RunEnded(at=1.0, reason="after", version=0, updates=0)
    while controller._ended is None:
        controller._tick()
    assert controller._ended.reason == "after"
    assert run.exit_codes.keys() == {"aggregator", "d-1", "d-2"}


def test_run_clock_starts_after_all_links_are_measured(tmp_path: Path) -> None:
    """A probe would take of what others share with its device. Told twice, it is written once."""
    run = spec(tmp_path, more="scenario: [{at: 5s, join: d-2}]")
    linked = [replace(device, link=AccessLink(rtt=0.1)) for device in run.plan.devices]
    run = replace(run, plan=replace(run.plan, runtime="docker", devices=tuple(linked), device_cpus="1"))
    assert run.plan.absent == frozenset({"d-2"})
    assert run.plan.probed_devices == frozenset({"d-1", "d-2"})
    controller, names = Controller(run, Idle(), Lines()), Topics(run.directory.run)

    def say(topic: str, text: str) -> None:
        controller._inbox.receive(ReceivedMessage(topic, text.encode(), 0))

    for component in ("aggregator", "d-1"):
        say(names.status(component), "ready")
    for _ in range(2):
        say(names.telemetry("d-1"), '{"device": "d-1", "at": 1.0, "probe": {}}')
    later = '{"device": "d-2", "at": 2.0, "probe": {}}'
    timer = threading.Timer(1.0, say, (names.telemetry("d-2"), later))
    begin = time.monotonic()
    timer.start()
    hold_barrier(controller, Asked(controller, names, AS_REQUESTED))
    assert time.monotonic() - begin >= 1.0
    lines = [line for line in Samples(run.directory.telemetry).read() if "probe" in line]
    assert [line["device"] for line in lines] == ["d-1", "d-2"]


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        ({}, None),
        ({"swap": NO_LIMIT}, "set other limits for d-1's container: it may swap (without limit)"),
        ({"quota": 1001}, "its CPU quota is 1001 of 50000 µs, requested 5000 of 50000 µs"),
    ],
)
def test_run_clock_does_not_start_with_wrong_kernel_limits(
    kernel: dict[str, int], told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testbed.run.barrier._LIMITS_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr("testbed.run.barrier._ASKING_INTERVAL_SECONDS", 0.1)
    run = spec(tmp_path, devices=1)
    run = replace(run, plan=replace(run.plan, runtime="docker", device_cpus="1"))
    controller, names = Controller(run, Idle(), Lines()), Topics(run.directory.run)
    for component in ("aggregator", "d-1"):
        controller._inbox.receive(ReceivedMessage(names.status(component), b"ready", 0))
    connection = Asked(controller, names, AS_REQUESTED | kernel)
    if told is None:
        hold_barrier(controller, connection)
    else:
        with pytest.raises(RunFailedError, match=re.escape(told)):
            hold_barrier(controller, connection)


class Measuring(Connection):
    """A connection to `d-1`, which measures its link with the next of the rates `ups` when it is asked
    to, and to a router, which measures segments with those of `segments`."""

    def __init__(
        self, run: RunSpec, controller: Controller, ups: list[float], segments: list[float]
    ) -> None:
        self._names, self._controller = Topics(run.directory.run), controller
        self._ups, self._segments = ups, segments
        self.asked: list[tuple[str, list[str]]] = []
        """Component and names of each order to measure."""
        self.doubts: list[str] = []
        """Notes for the aggregator at the start."""

    def publish(self, topic: str, payload: Any, *, retain: bool = False) -> None:
        _, component = self._names.kind_and_name(topic)
        order = json.loads(payload)
        if component == "aggregator":
            if order["do"] == "note" and not order["message"].startswith("measured"):
                self.doubts.append(order["message"])
            return
        measured = order["measure"]
        self.asked.append((component, measured))
        if component == "router":
            rates = {"full": 1e6, "reach": 1e6, "alone": 1e6, "together": self._segments.pop(0)}
            answer: dict[str, Any] = {"segments": [{"segment": measured[0], "way": "up", **rates}]}
        else:
            answer = {"probe": {"up": self._ups.pop(0)}}
        answer |= {"device": component, "at": time.monotonic()}
        received = ReceivedMessage(self._names.telemetry(component), json.dumps(answer).encode(), 0)
        self._controller._inbox.receive(received)


BUSY, QUIET = OtherWork("others use 1.3 of 2 cores", True), OtherWork("others use 0 of 2 cores", False)
WRONG = "the uplink of d-1 was 50.0% less than requested, as measured before the run clock started"


@pytest.mark.parametrize(
    ("ups", "segments", "work", "told"),
    [
        ([0.95e6], [], QUIET, None),
        ([0.88e6], [], QUIET, "the uplink of d-1 was 12.0% less than requested"),
        ([0.5e6], [], QUIET, f"{WRONG}, in 1 measurement (others use 0 of 2 cores)"),
        ([0.5e6, 0.99e6], [], BUSY, None),
        ([0.5e6] * 4, [], BUSY, f"{WRONG}, in 4 measurements (others use 1.3 of 2 cores)"),
        ([0.5e6, 0.88e6, 0.88e6, 0.88e6], [], BUSY, "the uplink of d-1 was 12.0% less than requested"),
        ([0.99e6], [0.5e6, 1e6], BUSY, None),
        ([0.99e6], [0.5e6] * 4, BUSY, "the rate up of segment cell for all senders was -50.0 % off"),
    ],
)
def test_wrong_links_are_measured_again_only_on_a_busy_host(
    ups: list[float],
    segments: list[float],
    work: OtherWork,
    told: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_load, "PAUSES", (0.1, 0.1, 0.1))
    monkeypatch.setattr(HostWatch, "other_work", lambda _: [work])
    run = spec(tmp_path, devices=1)
    cell = {"cell": Segment("cell", up=1_000_000)} if segments else {}
    linked = tuple(replace(device, link=AccessLink(up=1_000_000)) for device in run.plan.devices)
    run = replace(run, plan=replace(run.plan, devices=linked, segments=cell))
    before = '{"device": "d-1", "at": 1.0, "probe": {"up": 9e6}}\n'  # of a run that is carried on
    run.directory.telemetry.write_text(before)
    view = Lines()
    controller = Controller(run, Idle(), view)
    connection = Measuring(run, controller, ups, segments)
    controller.core.run.status = {"aggregator": "ready", "d-1": "ready"}
    controller.core.run.unmeasured = {"d-1", *cell}
    connection.publish(connection._names.control("d-1"), '{"measure": ["d-1"]}')
    if cell:
        connection.publish(connection._names.control("router"), '{"measure": ["cell"]}')
    if told is not None and ("as measured" in told or "segment" in told):
        with pytest.raises(RunFailedError, match=re.escape(told)):
            hold_barrier(controller, connection)
    else:
        hold_barrier(controller, connection)
        assert connection.doubts == ([] if told is None else [doubt_note(told)])
    assert (ups, segments) == ([], [])
    again = [one for one in view.lines if one.startswith("Measuring")]
    assert len(again) == len(connection.asked) - 1 - len(cell)
    assert set(again) <= {"Measuring 1 link again: the host is busy (others use 1.3 of 2 cores)"}
    lines = Samples(run.directory.telemetry).read()
    assert len(lines) == 1 + len(connection.asked)


def test_links_of_devices_that_left_meanwhile_count_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_load, "PAUSES", (0.1, 0.1, 0.1))
    monkeypatch.setattr(HostWatch, "other_work", lambda _: [BUSY])
    run = spec(tmp_path, more="start: {quorum: 50%}")
    linked = tuple(replace(device, link=AccessLink(up=1_000_000)) for device in run.plan.devices)
    run = replace(run, plan=replace(run.plan, devices=linked))
    run.directory.telemetry.write_text("")
    runtime = Idle()
    controller = Controller(run, runtime, Lines())
    connection = Measuring(run, controller, [], [])
    controller.core.run.status = {"aggregator": "ready", "d-1": "ready", "d-2": "ready"}
    with run.directory.telemetry.open("a") as telemetry:
        for name, up in (("d-1", 1e6), ("d-2", 0.5e6)):
            telemetry.write(json.dumps({"device": name, "at": 2.0, "probe": {"up": up}}) + "\n")
    ended = dict[str, int]()
    monkeypatch.setattr(runtime, "exit_codes", lambda: ended)
    hold_barrier(controller, connection, lambda one: one.core.run.phase is ControllerPhase.PAUSED)
    ended["d-2"] = 1
    controller._supervise = 0.0
    while not controller.core.run.has_started:
        controller._tick()
    assert connection.asked == []
    assert connection.doubts == []


def test_interruption_ends_the_pause_before_a_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_load, "PAUSES", (3600.0,))
    monkeypatch.setattr(HostWatch, "other_work", lambda _: [BUSY])
    run = spec(tmp_path, devices=1)
    linked = tuple(replace(device, link=AccessLink(up=1_000_000)) for device in run.plan.devices)
    run = replace(run, plan=replace(run.plan, devices=linked))
    run.directory.telemetry.write_text("")

    class Interrupting(Lines):
        def progress(self, message: str) -> None:
            if message.startswith("Measuring"):
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    controller = Controller(run, Idle(), Interrupting())
    controller.core.run.status = {"aggregator": "ready", "d-1": "ready"}
    run.directory.telemetry.write_text('{"device": "d-1", "at": 2.0, "probe": {"up": 5e5}}\n')
    with pytest.raises(KeyboardInterrupt):
        hold_barrier(controller, Measuring(run, controller, [], []))
    assert controller.core.run.phase is ControllerPhase.PAUSED


def test_second_signal_ends_what_hangs() -> None:
    """As of a run in virtual time whose own rule hangs: the first one waits for the instant."""
    with interrupting(spared=1) as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)

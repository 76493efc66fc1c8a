"""The process runtime with a real broker and stand-ins for the agents."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agents import config
from agents.config import AccessLink, BrokerAccess, ClientConfig
from agents.device_actions import (
    Crash,
    DeviceAction,
    Disconnect,
    Join,
    Leave,
    Pause,
    Reconnect,
    Restart,
    Resume,
    SetLink,
)
from agents.mqtt.topics import CONTROLLER as CONTROLLER_COMPONENT
from agents.mqtt.topics import ROUTER, Topics
from agents.mqtt.transport import Connection, ConnectionFailedError, ReceivedMessage
from agents.wire import messages
from testbed.broker import find_mosquitto
from testbed.errors import BadInputError, HostError
from testbed.host import forkserver, programs
from testbed.host.cpus import cpu_numbers
from testbed.plan import plan, this_host
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.process import runtime as process
from testbed.runtimes.process.runtime import GRACE_SECONDS, ProcessRuntime, Programs
from testbed.topology import parse
from tests.waiting import eventually

SLEEP = "import time; time.sleep(600)"
BUSY = "print('busy', flush=True)\nwhile True: pass"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + BUSY
BROKERS = [None, *filter(None, [find_mosquitto()])]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def module(folder: Path, code: str) -> tuple[str, ...]:
    """A Python module with a function `main` that does what `code` says."""
    text = f"import random\nimport numpy\n\ndef main():\n    exec({code!r}, {{}})\n"
    (folder / "stand_in.py").write_text(text)
    return tuple(programs.command("stand_in"))


def spec(path: Path, devices: int = 2, cpu: float = 0.1, more: str = "") -> RunSpec:
    """A run in the folder `path`."""
    topology = parse(f"""
name: t
task: {{name: digits-logreg, local: {{steps: 1}}}}
rule: {{name: fedavg}}
devices: [{{name: d, count: {devices}, cpu: {cpu}}}]
{"" if "stop:" in more else "stop: {after: 10s}"}
{more}
""")
    planned = plan(topology, "process", this_host(), oversubscribe=True)
    directory = RunDirectory.create(path, f"t-{path.name}")
    return RunSpec(directory, topology, planned, {d.name: 1 for d in planned.devices})


Make = Callable[..., ProcessRuntime]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A function that makes the runtime of a run; what it starts is gone after the test."""
    made: list[ProcessRuntime] = []
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def make(
        run: RunSpec, client: str = SLEEP, mosquitto: str | None = BROKERS[-1], *, forked: bool = True
    ) -> ProcessRuntime:
        program = module(tmp_path, client) if forked else python(client)
        made.append(ProcessRuntime(run, Programs(mosquitto, python(SLEEP), program)))
        return made[-1]

    yield make
    for runtime in made:
        runtime.stop()


TELL = (
    "import os, random, sys, numpy; print(f'{os.getsid(0) == os.getpid()} {sys.argv[1]} "
    "{random.random()} {numpy.random.random()} {dict(os.environ)}')"
)


@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.parametrize("mosquitto", BROKERS, ids=lambda path: "mosquitto" if path else "embedded")
def test_run_from_start_to_stop(
    make: Make, mosquitto: str | None, tmp_path: Path, *, forked: bool
) -> None:
    run = spec(tmp_path)
    directory = run.directory
    runtime = make(run, f"{TELL}; {SLEEP}", mosquitto, forked=forked)
    log_in(runtime.start())
    log_in(config.load(ClientConfig, directory.config("d-2")).broker)

    told = log_of(run, "d-1")
    assert told.startswith(f"True {directory.config('d-1')} ")
    assert f"'TESTBED_RUN': '{directory.run}'" in told
    assert "'TESTBED_PART': 'd-1'" in told
    assert "'OMP_NUM_THREADS': '1'" in told
    drawn = {number for name in ("d-1", "d-2") for number in log_of(run, name).split()[2:4]}
    assert len(drawn) == 4, "each process draws other random numbers"
    assert components(run) == {"broker", "aggregator", "d-1", "d-2"}
    (live,) = (one for one in process.live_runs() if one.run == directory.run)
    assert live.components == 4
    assert {info.directory for info in of(run)} == {str(directory.path)}
    sample = runtime.meter.telemetry()[0]
    assert isinstance(sample, messages.UsageSample)
    assert sample.device == "d-1"
    assert sample.memory > 1_000_000
    assert runtime.exit_codes() == {}

    runtime.stop()
    runtime.stop()
    assert of(run) == []
    assert runtime.exit_codes().keys() == {"broker", "aggregator", "d-1", "d-2"}


CUTS = "scenario: [{at: 5s, disconnect: d-1, for: 1s}]"


def test_relay_is_started_if_devices_have_links(make: Make, tmp_path: Path) -> None:
    run = spec(tmp_path, more=CUTS)
    runtime = make(run)
    direct = runtime.start()
    through = config.load(ClientConfig, run.directory.config("d-1")).broker
    assert through.port != direct.port
    log_in(through)
    assert components(run) == {"broker", "router", "aggregator", "d-1", "d-2"}
    assert runtime.act("d-1", Disconnect()) == [("router", messages.DeviceOrder("d-1", Disconnect()))]
    assert runtime.act("d-2", SetLink({"up": None, "rtt": 0.5})) == [
        ("router", messages.DeviceOrder("d-2", SetLink({"up": None, "rtt": 0.5})))
    ]
    with pytest.raises(BadInputError, match="cannot lose packets"):
        runtime.act("d-1", SetLink({"loss": 0.1}))


def test_relay_reports_invalid_commands_and_continues(make: Make, tmp_path: Path) -> None:
    run = spec(tmp_path, more=CUTS)
    runtime = make(run)
    names, failures = Topics(run.directory.run), queue.SimpleQueue[ReceivedMessage]()
    controller = Connection(runtime.start(), [names.failure(ROUTER)], failures.put)
    controller.open()

    def refused(payload: bytes) -> str:
        controller.publish(names.control(ROUTER), payload)
        event = failures.get(timeout=120)
        assert isinstance(event, ReceivedMessage)
        return event.payload.decode()

    assert "not a JSON" in refused(b"[" * 60_000)
    assert "devices of its run" in refused(
        messages.encode(messages.DeviceOrder("stranger", Disconnect()))
    )
    broker = config.load(ClientConfig, run.directory.config("d-1")).broker
    log_in(broker)
    for component in ("d-1", "stranger"):  # of which the second says that the first was obeyed
        controller.publish(
            names.control(ROUTER), messages.encode(messages.DeviceOrder(component, Disconnect()))
        )
    failures.get(timeout=120)

    def is_cut_off() -> bool:
        with suppress(ConnectionFailedError):
            (connection := Connection(broker, [], lambda _: None)).open(2.0)
            connection.close()
            return False
        return True

    eventually(is_cut_off)
    controller.close()


def test_link_rates_are_divided_by_the_dilation(make: Make, tmp_path: Path) -> None:
    runtime = make(spec(tmp_path, more=f"{CUTS}\ndilation: 4"))
    change = SetLink({"up": 1_000_000, "rtt": 0.5, "jitter": None})
    ((_, order),) = runtime.act("d-1", change)
    assert order == messages.DeviceOrder("d-1", SetLink({"up": 250_000, "rtt": 2.0, "jitter": 0.0}))


@pytest.mark.parametrize("action", [SetLink({"up": 1_000_000}), Disconnect()])
def test_link_change_without_a_relay_is_refused(
    make: Make, tmp_path: Path, action: DeviceAction
) -> None:
    with pytest.raises(BadInputError, match="no device has a link: add one"):
        make(spec(tmp_path)).act("d-1", action)


def test_failed_relay_is_an_error_with_its_output(tmp_path: Path) -> None:
    run = spec(tmp_path, more=CUTS)
    programs = Programs(aggregator=python(SLEEP), client=python(SLEEP), relay=python("1/0"))
    runtime = ProcessRuntime(run, programs)
    try:
        with pytest.raises(HostError, match=r"(?s)relay does not answer.*router\.log:\n.*ZeroDivision"):
            runtime.start()
    finally:
        runtime.stop()


def test_run_with_an_unknown_link_does_not_start(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> dict[str, float]:
        raise TimeoutError("timed out")

    monkeypatch.setattr("testbed.relay.relay_process.measure_link", measure)
    run = spec(tmp_path, more="scenario: [{at: 1s, set: d-1, link: {rtt: 1ms}}]")
    linked = [replace(device, link=AccessLink(rtt=0.01)) for device in run.plan.devices]
    runtime = make(replace(run, plan=replace(run.plan, devices=tuple(linked))))
    with pytest.raises(HostError, match=r"link of d-1 cannot be measured \(timed out\)"):
        runtime.start()
    assert components(run) == {"broker", "router"}  # which the controller then stops


def log_in(broker: BrokerAccess) -> None:
    connection = Connection(broker, [], lambda _: None)
    connection.open()
    connection.close()


def test_device_is_limited_and_pinned_to_its_cpus(make: Make, tmp_path: Path) -> None:
    run = spec(tmp_path, devices=1, cpu=0.01)
    runtime = make(run, BUSY)
    runtime.start()
    log_of(run, "d-1")
    (device,) = (info.process for info in of(run) if info.component == "d-1")
    runtime.limit("d-1")
    eventually(lambda: device.status() == psutil.STATUS_STOPPED)
    assert set(device.cpu_affinity() or []) == cpu_numbers(run.plan.device_cpus)


@pytest.mark.timed
def test_stop_is_quick_with_twenty_unresponsive_processes(make: Make, tmp_path: Path) -> None:
    run = spec(tmp_path, devices=20, cpu=0.01)
    runtime = make(run, STUBBORN)
    runtime.start()
    names = [device.name for device in run.plan.devices]
    for name in names:
        log_of(run, name)
        runtime.limit(name)
    begin = time.monotonic()
    runtime.stop()
    assert time.monotonic() - begin < GRACE_SECONDS + 3
    assert of(run) == []
    assert {runtime.exit_codes()[name] for name in names} == {-signal.SIGKILL}


def test_device_that_never_joined_can_be_paused(make: Make, tmp_path: Path) -> None:
    runtime = make(spec(tmp_path, more="scenario: [{at: 5s, join: d-2}]"))
    runtime.start()
    runtime.act("d-2", Pause())
    runtime.stop()
    assert runtime.exit_codes().keys() == {"broker", "aggregator", "d-1"}


SLOW_GOODBYE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(0)))
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("pause", [0.0, 0.05])
@pytest.mark.parametrize(
    ("ends", "begins"), [(Crash(), Restart()), (Leave(), Join())], ids=["crash", "leave"]
)
def test_client_restarts_at_once_when_ordered(
    make: Make, tmp_path: Path, ends: DeviceAction, begins: DeviceAction, pause: float
) -> None:
    """The old process may still exist then; an action that pauses it must not pause the new one."""
    run = spec(tmp_path, devices=1)
    runtime = make(run, SLOW_GOODBYE)
    runtime.start()
    log_of(run, "d-1")
    (old,) = (info.process.pid for info in of(run) if info.component == "d-1")
    for action in (ends, None, begins, Pause(), Resume()):
        if action is None:
            time.sleep(pause)
        else:
            runtime.act("d-1", action)

    def came_back() -> bool:
        assert runtime.exit_codes() == {}
        return [info.process.pid for info in of(run) if info.component == "d-1"] not in ([], [old])

    eventually(came_back)
    assert runtime.act("d-1", Restart()) == []  # it is there
    # A process that executes another program has, for a moment, no environment to be found by.
    eventually(lambda: len([info for info in of(run) if info.component == "d-1"]) == 1)
    runtime.act("d-1", Leave())
    runtime.act("d-1", Join())
    runtime.stop()  # a restart that has not come yet is dropped
    runtime.exit_codes()
    assert of(run) == []


def test_rejoining_client_is_neither_paused_nor_disconnected(make: Make, tmp_path: Path) -> None:
    run = spec(tmp_path, more=CUTS)
    runtime = make(run)
    runtime.start()
    for action in (Disconnect(), Pause(), Crash()):
        runtime.act("d-1", action)
    eventually(lambda: "d-1" not in components(run))
    assert runtime.act("d-1", Join()) == [("router", messages.DeviceOrder("d-1", Reconnect()))]

    def back() -> list[psutil.Process]:
        assert runtime.exit_codes() == {}
        return [info.process for info in of(run) if info.component == "d-1"]

    (device,) = eventually(back)
    assert device.status() != psutil.STATUS_STOPPED


def test_total_cpu_use_does_not_fall_when_a_device_ends(make: Make, tmp_path: Path) -> None:
    run = spec(tmp_path, devices=1)
    runtime = make(run, BUSY)
    runtime.start()
    log_of(run, "d-1")
    used = eventually(runtime.meter.device_cpu_seconds)
    runtime.act("d-1", Crash())
    eventually(lambda: "d-1" not in components(run))
    assert (runtime.meter.device_cpu_seconds() or 0.0) >= used
    runtime.act("d-1", Restart())
    eventually(lambda: runtime.exit_codes() == {} and "d-1" in components(run))
    assert eventually(lambda: (runtime.meter.device_cpu_seconds() or 0.0) > used)


def test_device_that_exits_or_cannot_be_imported_is_reported(make: Make, tmp_path: Path) -> None:
    (tmp_path / "exits").mkdir()
    runtime = make(spec(tmp_path / "exits"), "raise SystemExit(3)")
    runtime.start()
    eventually(lambda: len(runtime.exit_codes()) == 2)
    assert runtime.exit_codes() == {"d-1": 3, "d-2": 3}
    assert runtime.meter.telemetry() == []
    runtime.limit("d-1")
    runtime = make(spec(tmp_path))
    (tmp_path / "stand_in.py").write_text("import no_such_module")
    with pytest.raises(HostError, match=r"(?s)exit code 1:\n.*No module named 'no_such_module'"):
        runtime.start()


def test_failed_broker_is_an_error_with_its_output(make: Make, tmp_path: Path) -> None:
    runtime = make(spec(tmp_path), mosquitto=sys.executable)  # which takes `-c CONF` for code
    with pytest.raises(HostError, match=r"(?s)exit code 1\..*broker\.log:\n.*SyntaxError"):
        runtime.start()


@pytest.mark.skipif(not forkserver.AVAILABLE, reason="Linux only")
def test_stopped_fork_server_is_continued_when_a_run_needs_it(tmp_path: Path) -> None:
    """Otherwise neither the restart of a device nor the end of the run would end."""
    (tmp_path / "sleeper.py").write_text("import time\n\ndef main():\n    time.sleep(600)\n")
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    server = forkserver.ForkServer(["sleeper"], os.environ | paths, "PART", 9)
    try:
        server._process.send_signal(signal.SIGSTOP)
        with (tmp_path / "log").open("wb") as log:
            fork = server.fork("sleeper", "", name="d-1", cpus="0", log=log.fileno())
        server._process.send_signal(signal.SIGSTOP)
        fork.kill()
        assert fork.wait() == -signal.SIGKILL
    finally:
        server.close()


def test_remove_ends_processes_left_by_a_crash_and_nothing_else(tmp_path: Path) -> None:
    ours, other = (
        subprocess.Popen(python(SLEEP), env={**os.environ, process.RUN: f"{name}-{tmp_path.name}"})
        for name in ("ours", "other")
    )
    with ours, other:
        psutil.Process(ours.pid).suspend()
        try:
            assert [info.process.pid for info in found(f"ours-{tmp_path.name}")] == [ours.pid]
            assert process.remove(f"ours-{tmp_path.name}") == 1
            assert ours.wait(120) == -signal.SIGTERM
            assert other.poll() is None
        finally:
            ours.kill()
            other.kill()


def test_stop_spares_programs_started_by_the_controller(make: Make, tmp_path: Path) -> None:
    """For example a tracker, which inherits the marks of a controller in the background."""
    run = spec(tmp_path, devices=1)
    marks = process.environment(run.directory, CONTROLLER_COMPONENT)
    with subprocess.Popen(python(SLEEP), env={**os.environ, **marks}) as tracker:
        try:
            runtime = make(run)
            runtime.start()
            runtime.stop()
            assert [info.process.pid for info in of(run)] == [tracker.pid]
            assert process.remove(run.directory.run) == 1
            assert tracker.wait(120) == -signal.SIGTERM
        finally:
            tracker.kill()


def test_remove_spares_its_caller_and_parents(tmp_path: Path) -> None:
    run = f"ours-{tmp_path.name}"
    remover = f"from testbed.runtimes.process.runtime import remove; print(remove({run!r}))"
    parent = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {remover!r}]))"
    done = subprocess.run(
        python(parent), env={**os.environ, process.RUN: run}, capture_output=True, check=True
    )
    assert done.stdout == b"0\n"


@pytest.mark.parametrize(
    ("parent", "program", "told"),
    [
        (1, "echo", "controller ended"),
        (0, "no-such-program", "cannot start no-such-program on cpu 0: No such file or directory\n"),
    ],
)
def test_program_that_cannot_start_says_why(parent: int, program: str, told: str) -> None:
    """It does not start after its parent died."""
    pid = str(parent or os.getpid())
    command = [sys.executable, "-I", programs.__file__, pid, "0", "--", program, "alive"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert told in done.stderr


def test_cpu_lists_are_parsed() -> None:
    assert cpu_numbers("0-2,5") == {0, 1, 2, 5}


def log_of(run: RunSpec, component: str) -> str:
    """The log of `component`, as soon as there is something in it."""
    return eventually((run.directory.logs / f"{component}.log").read_text)


def found(run: str) -> list[process.ProcessInfo]:
    return [info for info in process.find() if info.run == run]


def of(run: RunSpec) -> list[process.ProcessInfo]:
    return found(run.directory.run)


def components(run: RunSpec) -> set[str]:
    return {info.component for info in of(run)} - {forkserver.NAME}

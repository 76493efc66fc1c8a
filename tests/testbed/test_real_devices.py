"""Real devices without a network: keys, plan, answers of a device that means harm, and the keeper."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest

from agents.config import AccessLink
from agents.device.link import queue_bytes
from agents.remote import program
from testbed import topology
from testbed.broker import BrokerLimits, Listeners, mosquitto_conf
from testbed.broker.access import new_identity
from testbed.errors import BadInputError, HostError
from testbed.host.nodes import Node
from testbed.plan import HostResources, device_table, node_table, plan
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.ssh import environment, hosts, inspection, removal
from testbed.runtimes.ssh.connection import Connections, SshTarget, errors_of, in_parallel
from testbed.runtimes.ssh.hosts import RealDevice
from tests.waiting import eventually

HOST = HostResources(cores=(0, 1), memory=16 * 2**30)
NODE = Node(id="a", name="a", cores=2, memory=16 * 2**30, labels={}, here=True)
SERVER = "server: {address: 192.168.1.10}\n"


def parse(devices: str, more: str = SERVER) -> topology.Topology:
    return topology.parse(
        "name: fleet\ntask: {name: digits-logreg, local: {steps: 20}}\nrule: {name: fedasync}\n"
        f"devices: [{devices}]\nstop: {{updates: 10}}\n{more}"
    )


def refusal(devices: str, more: str = SERVER) -> str:
    with pytest.raises(BadInputError) as refused:
        parse(devices, more)
    return str(refused.value)


def test_each_host_is_a_device_without_numbers_to_emulate() -> None:
    read = parse("{name: near, cpu: 0.2}, {name: pi, hosts: [pi@raspi-1, 'ssh://raspi-2:2222']}")
    made = plan(read, "process", HOST)
    assert [(one.name, one.host) for one in made.devices] == [
        ("near", None),
        ("pi-1", "pi@raspi-1"),
        ("pi-2", "ssh://raspi-2:2222"),
    ]
    assert [one.name for one in made.emulated_devices] == ["near"]
    real = made.real_devices[0]
    assert (real.cpu, real.memory, real.link, real.threads) == (None, 0, None, 0)
    assert made.server == ("192.168.1.10", 8883)
    assert any("192.168.1.10, port 8883" in note for note in made.notes)
    again = topology.parse(read.to_yaml())
    assert plan(again, "process", HOST).devices == made.devices


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cpu", "0.5"),
        ("memory", "1GiB"),
        ("link", "lte"),
        ("timing", "1s"),
        ("think", "1s"),
        ("profile", "raspberry-pi-4"),
        ("thermal", "{after: 1s, to: 0.5}"),
        ("access", "{name: wifi, up: 1mbit}"),
        ("image", "mine:1"),
        ("gpu", "true"),
        ("availability", "{on: 1s, off: 1s}"),
        ("count", "2"),
    ],
)
def test_key_of_an_emulated_device_is_refused_for_a_real_one(key: str, value: str) -> None:
    told = refusal(f"{{name: pi, hosts: [pi@raspi-1], {key}: {value}}}")
    assert key in told
    assert "remove" in told


@pytest.mark.parametrize(
    ("hosts", "more", "told"),
    [
        ("[pi@raspi-1]", "", "server: {address: 192.168.1.10}"),
        ("[pi@raspi-1]", "server: {address: 0.0.0.0}", "found 0.0.0.0"),
        ("[pi@raspi-1]", "server: {address: raspi}", "found raspi"),
        ("[pi@raspi-1]", SERVER + "dilation: 2", "real time"),
        ("[pi@raspi-1, node-2]", SERVER, "node-2 is the name of a node"),
        ("[ssh://-oProxyCommand=x]", SERVER, "expected user@host"),
        ("['-o@x']", SERVER, "expected user@host"),
        ("[pi@raspi-1]", SERVER + "scenario: [{at: 1s, set: pi, cpu: 0.1}]", "limits do not change"),
        ("[pi@raspi-1]", SERVER + "scenario: [{at: 1s, disconnect: pi, for: 1s}]", "not cut off"),
        ("[root@raspi-1], shape: true", SERVER, "has no effect"),
        ("[root@raspi-1], shape: true, cpu: 1, container: docker", SERVER, "container"),
        ("[root@raspi-1], shape: true, cpu: 1, memory: 1GiB", SERVER, "memory"),
        ("[root@raspi-1], shape: true, link: {trace: {csv: x.csv}}", SERVER, "link.trace"),
        ("[root@raspi-1], cpu: 1", SERVER, "shape: true"),
    ],
)
def test_contradiction_names_its_place_and_mend(hosts: str, more: str, told: str) -> None:
    assert told in refusal(f"{{name: pi, hosts: {hosts}}}", more)


def test_limits_of_a_real_device_take_nothing_of_this_host() -> None:
    pi = "{name: pi, hosts: [root@raspi-1], shape: true, cpu: 3, link: {up: 2mbit, rtt: 40ms}}"
    read = parse(f"{{name: near, cpu: 0.2}}, {pi}")
    made = plan(topology.parse(read.to_yaml()), "process", HOST)
    (real,) = made.real_devices
    assert (real.cpu, real.link, real.threads) == (None, None, 0)
    shaped = real.as_shaped
    assert (shaped.cpu, shaped.quota, shaped.period, shaped.threads) == (3, 30_000, 10_000, 3)
    assert shaped.link == AccessLink(up=2_000_000, rtt=0.04)
    assert real.shape is not None
    assert real.shape.needs_netem
    assert made.shaper is None
    row = device_table(made)[1]
    assert (row["cpu"], row["quota"], row["up"]) == (3, "30/10 ms", "2mbit")


def test_one_link_of_a_machine_has_one_device() -> None:
    pi = "hosts: [root@raspi-1], shape: true, link: lte"
    assert "root@raspi-1" in refusal(f"{{name: a, {pi}}}, {{name: b, {pi}}}")
    both = parse(f"{{name: a, {pi}}}, {{name: b, hosts: [root@raspi-1], shape: true, cpu: 1}}")
    assert both.device_names == ("a", "b")  # one host has the name of its group
    read = parse("{name: pi, hosts: [pi@raspi-1], link: {compression: {kind: int8}}}")
    assert [one.name for one in plan(read, "process", HOST).devices[0].steps] == ["compression"]


class Late:
    """A source of 8 chunks of 1000 bytes, one every 10 ms. Its reader takes the second to the fourth
    together with the fifth."""

    def __init__(self, clock: list[int]) -> None:
        self._clock, self._chunk = clock, 0

    def read1(self, size: int) -> bytes:
        self._chunk += 1
        late = 5 if 2 <= self._chunk <= 4 else self._chunk
        self._clock[0] = 10_000_000 * late
        return bytes(1000)


def test_rate_of_a_shaped_link_is_right_though_it_is_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr("time.monotonic_ns", lambda: clock[0])
    assert program.receive(Late(clock), 8000, is_shaped=True) == (8 * 100_000, 0.08)
    clock[0] = 0
    varying, _ = program.receive(Late(clock), 8000, is_shaped=False)
    assert varying == 16 * 100_000  # 6 chunks after the second, in 30 ms
    assert program.receive(Late([0]), 1000, is_shaped=True)[0] is None


class Clocked:
    """A sink that takes all at once, whose writer's clock passes only while the writer sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.written: list[tuple[float, int]] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def write(self, data: bytes) -> None:
        self.written.append((self.now, len(data)))

    def flush(self) -> None:
        """Nothing is held back."""


def test_transfer_over_a_shaped_link_keeps_its_queue_from_overflowing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TCP would lose packets, hand over at once what came after them, and 50 % too much was measured."""
    rate, sink = 4_000_000, Clocked()
    monkeypatch.setattr("time.monotonic", lambda: sink.now)
    monkeypatch.setattr("time.sleep", sink.sleep)
    (size,) = program.sizes(rate, 2.0)
    program.send(sink, size, rate)
    sent = [*accumulate(each for _, each in sink.written)]
    assert sent[-1] == size
    ahead = [done - at * rate / 8 for (at, _), done in zip(sink.written, sent, strict=True)]
    assert max(ahead) < queue_bytes(rate) / 2
    assert min(ahead) > 0, "the link has always something to carry"
    assert sink.now == pytest.approx(2.0, rel=0.05)
    program.send(unlimited := Clocked(), size, None)
    assert unlimited.now == 0


def test_machine_or_runtime_that_cannot_have_the_device_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = {"server": "192.0.2.1", "link": True, "netem": False, "cpu": None, "ifb": "ifbx"}
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setenv("LOGNAME", "pi")
    assert "log in as root" in str(program.unshapeable({"shape": shape}))
    assert program.unshapeable({}) is None
    with pytest.raises(BadInputError, match="docker, swarm or process runtime"):
        plan(parse("{name: pi, hosts: [pi@raspi-1]}"), "virtual", HOST)


def test_real_devices_are_on_no_node_of_a_swarm() -> None:
    read = parse("{name: near, cpu: 0.2, hosts: [a]}, {name: pi, hosts: [pi@raspi-1, ssh://raspi-2]}")
    made = plan(read, "swarm", replace(HOST, nodes=(NODE,)))
    assert made.placement == {"near": "a"}
    assert made.server == ("192.168.1.10", 8883)
    assert [row["devices"] for row in node_table(made)] == [1]
    assert [row.get("node") for row in device_table(made)] == ["a", None, None]


def test_broker_listens_for_real_devices_with_tls_at_their_address_alone() -> None:
    at = Listeners("127.0.0.1", 1883, remote=("192.168.1.10", 8883))
    lines = mosquitto_conf(at, "/files", BrokerLimits()).splitlines()
    listeners = [number for number, line in enumerate(lines) if line.startswith("listener ")]
    assert [lines[number] for number in listeners] == [
        "listener 1883 127.0.0.1",
        "listener 8883 192.168.1.10",
    ]
    assert "certfile /files/certificate.pem" in lines[listeners[1] :]
    assert "certfile /files/certificate.pem" not in lines[: listeners[1]]


def hostile(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> SshTarget:
    """A stand-in for ssh that answers like a device that means harm: `script` gets the token."""
    file = folder / "ssh.py"
    file.write_text(
        "import json, sys\n"
        "source, sink = sys.stdin.buffer, sys.stdout.buffer\n"
        "source.read(int(source.readline()))\n"
        "token = json.loads(source.readline())['token'].encode()\n" + script
    )
    monkeypatch.setenv("TESTBED_SSH", f"{sys.executable} {file}")
    return SshTarget("pi@raspi-1")


def test_description_of_a_device_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {
        "system": "Linux",
        "machine": "arm",
        "python": "3.11",
        "free": 2**40,
        "missing": [],
        "installed": True,
        "seen": "10.0.0.1\nall is well",
    }
    target = hostile(
        tmp_path, monkeypatch, f"sink.write(token + b'\\n' + {json.dumps(report)!r}.encode() + b'\\n')"
    )
    told = inspection.describe([target.host])[target.host]
    assert "sees this host at 10.0.0.1\\nall is well: write" in str(told)


CHECK = {"modules": [], "environment": "x", "servers": []}


@pytest.mark.parametrize(
    "script",
    [
        "sink.write(b'x' * 10**8)",
        "sink.write(b'junk\\n' * 10**6)",
        "sink.write(token + b'\\n' + b'[' * 10**7)",
        "sink.write(token + b'\\n\\x1b[2J not JSON\\n')",
        "sink.write(token + b'\\n' + json.dumps({'failure': '\\x1b[2J' * 10**4}).encode() + b'\\n')",
        "sys.stderr.write('\\x1b[2J' * 10**5); sys.exit(255)",
        "pass",
    ],
)
def test_hostile_output_is_bounded_and_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    target = hostile(tmp_path, monkeypatch, script)
    with pytest.raises(HostError) as refused:
        Connections().call(target, "check", CHECK, timeout=120)
    told = str(refused.value)
    assert told.startswith("pi@raspi-1: ")
    assert "\x1b" not in told
    assert len(told) < 4000
    greeting = "sink.write(b'Welcome!\\n' + token + b'\\n{\"kept\": []}\\n')"  # is skipped
    assert Connections().call(hostile(tmp_path, monkeypatch, greeting), "clean", {}) == {"kept": []}


@pytest.mark.parametrize(
    "listed",
    [
        [["../../escaped", 3]],
        [["disk/../../escaped", 3]],
        [["disk/a/b", 3]],
        [["disk/x", -1]],
        [["disk/x", 10**15]],
        [["log", "3"]],
        "all",
    ],
)
def test_files_outside_the_devices_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: object
) -> None:
    answer = f"json.dumps({{'files': {listed!r}}}).encode()"
    target = hostile(tmp_path, monkeypatch, f"sink.write(token + b'\\n' + {answer} + b'\\nabc')")
    directory = RunDirectory.create(tmp_path / "runs", "r")
    removal.note(directory, {"pi": target})
    with pytest.raises(HostError, match="valid"):
        removal.remove(directory)
    assert list(tmp_path.rglob("escaped")) == []
    assert directory.hosts.exists()  # nothing was removed


def test_unfit_device_is_described_with_a_mend() -> None:
    fit = {"python": "3.11.2", "system": "Linux", "free": 2**40, "missing": ["torch"], "venv": True}
    target = SshTarget("pi@raspi-1")

    def problem(*, own: bool = False, **changes: object) -> str:
        return str(environment._problem({**fit, **changes}, target, own_python=own))

    assert problem() == "None"
    assert "lacks torch" in problem(own=True)
    assert problem(python="3.10.1") == "None"
    assert "is Python 3.9.2, expected at least 3.10" in problem(python="3.9.2")
    assert "container: docker" in problem(python="3.9.2")
    assert "python3-venv" in problem(venv=False)
    assert "0.1 GiB free" in problem(free=10**8)
    assert "expected Linux" in problem(system="Darwin")
    for free in ("much", -(10**400), 10**400):
        assert "not valid" in problem(free=free)
    for python in ("³.¹¹", "3", "3.x", 3.11):
        assert "not valid" in problem(python=python)


def test_every_error_in_a_thread_for_a_device_is_an_error() -> None:
    """Such as a full disk of this host when files come back."""

    def task(error: Exception) -> None:
        raise error

    full = OSError(errno.ENOSPC, "No space left on device", "runs/a/disk/1")
    tasks = {
        "pi": partial(task, full),
        "nano": partial(task, OverflowError("too large")),
        "tx2": partial(task, HostError("tx2: it is off")),
    }
    told = [str(one) for one in errors_of(in_parallel({**tasks, "ok": lambda: None}))]
    assert told[0].startswith("pi: runs/a/disk/1: No space left on device")
    assert told[1:] == ["nano: OverflowError: too large", "tx2: it is off"]


@pytest.mark.parametrize(("name", "value"), [("rtt", 1e11), ("loss", 1.5)])
def test_impossible_measurement_of_a_device_is_refused(name: str, value: float) -> None:
    with pytest.raises(HostError, match=rf"impossible.*\$\.{name}"):
        hosts._link_figures({name: value})


def real_device(folder: Path) -> RealDevice:
    read = parse("{name: pi, hosts: [pi@raspi-1]}")
    made = plan(read, "process", HOST)
    spec = RunSpec(RunDirectory.create(folder, "run"), read, made, {"pi": 1})
    return RealDevice(spec, made.real_devices[0], Connections(), is_down=False)


def test_each_attempt_to_start_a_device_again_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that fails, as when its processes are killed while they start."""
    device = real_device(tmp_path)
    monkeypatch.setattr(device, "_configurations", list)
    failing = 'sink.write(token + b\'\\n{"failure": "the keeper did not start"}\\n\')'
    told = "the processes of pi had ended with exit code 137, and "
    for script, expected in (
        (failing, "starting them again failed"),
        ("sink.write(token + b'\\n{}\\n')", "were started again"),
    ):
        hostile(tmp_path, monkeypatch, script)
        with suppress(HostError):
            device._handle({"kept": False, "exit": 137, "uncertainty": 1000})
        assert [one.disturbance for one in device.take_disturbances()] == [told + expected]


def test_loss_of_contact_is_noted_once_when_it_is_noticed_and_again_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is silent until the end of the run makes the run not valid, too."""
    device = real_device(tmp_path)
    report = {"kept": True, "exit": None, "uncertainty": 1000}

    def noted(at: float, *, reports: bool = False) -> list[tuple[float, float, str, bool]]:
        monkeypatch.setattr("testbed.runtimes.ssh.hosts.time.monotonic", lambda: at)
        if reports:
            device._handle(report)
        taken = device.take_disturbances()
        return [(one.since, one.at, one.disturbance, one.is_over) for one in taken]

    told = "there was no contact with pi (pi@raspi-1)"
    assert noted(99.0) == noted(100.0, reports=True) == noted(102.0) == []
    assert noted(103.5) == [(100.0, 103.5, told, False)]
    assert noted(110.0) == []
    assert noted(120.0, reports=True) == [(100.0, 120.0, told, True)]
    assert noted(121.0, reports=True) == noted(123.0) == []


def test_keeper_without_broker_ends_all_and_removes_its_folder(tmp_path: Path) -> None:
    """Nobody has to come back for that. The stand-in for the init would run for ever."""
    folder = tmp_path / "runs" / "r" / "pi"
    (folder / "agents" / "device").mkdir(parents=True)
    (folder / "agents" / "__init__.py").touch()
    (folder / "agents" / "device" / "__init__.py").touch()
    here = Path(program.__file__).parents[1]
    remote = [f"remote/{name}.py" for name in ("__init__", "container", "keeper", "program")]
    for name in (*remote, "device/bound.py"):
        (folder / "agents" / name).parent.mkdir(exist_ok=True)
        (folder / "agents" / name).write_text((here / name).read_text())
    (folder / "agents" / "device" / "main.py").write_text("import time; time.sleep(600)")
    (folder / "broker.pem").write_text(new_identity("127.0.0.1").certificate)
    settings = '{"host": "127.0.0.1", "port": 1, "timeout": 0.1, "container": null, "groups": []}'
    keeper = subprocess.Popen([sys.executable, "-m", "agents.remote.keeper", settings], cwd=folder)
    eventually(lambda: len(program.processes_in(folder)) == 2)
    (init,) = (one for one in program.processes_in(folder) if one != keeper.pid)
    assert keeper.wait(120) == 0
    assert not folder.exists()
    assert not Path(f"/proc/{init}").exists()

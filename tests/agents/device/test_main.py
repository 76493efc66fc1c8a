"""The device's init when it is ordered to stop and start its client, for which a program stands in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agents.config import AccessLink, BrokerAccess, DeviceConfig
from agents.device import link, turns
from agents.device.machine import DeviceContainer
from agents.device.main import Init
from agents.device.netlink import TcpConnection
from agents.device_actions import (
    Crash,
    Disconnect,
    Join,
    Leave,
    Pause,
    PowerOn,
    Restart,
    Resume,
    SetLink,
    Switching,
)
from agents.energy import BatteryConfig, EnergyConfig
from agents.energy.init import EnergyInit
from agents.energy.messages import EnergyStart, PowerSwitch, SetBattery
from agents.mqtt.transport import ReceivedMessage
from agents.wire import messages
from tests.waiting import eventually

SLOW_GOODBYE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(0)))
print("up", flush=True)
time.sleep(600)
"""
CONFIG = DeviceConfig(
    run="r",
    device="pi",
    broker=BrokerAccess("/testbed/control/broker.socket", 0, "init/pi", ""),
    data_address="server",
    link=None,
    probed=None,
    client_config="client.json",
    isolated="isolated",
    turns=None,
    user=1000,
    timeout_s=0.1,
)


class Connection:
    def __init__(self, *_: object, **__: object) -> None:
        self.published: list[tuple[str, bytes]] = []

    def publish(self, topic: str, payload: bytes) -> None:
        self.published.append((topic, payload))

    publish_lossy = publish


@pytest.fixture
def cables(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Changes of the interface: True for enabled."""
    plugged: list[bool] = []
    monkeypatch.setattr(link, "plug", lambda _interface, *, up: plugged.append(up))
    return plugged


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, cables: list[bool]) -> None:
    """Stand-ins for all that an init meets outside of its container."""
    monkeypatch.setattr(link, "interface", lambda: "eth0")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("agents.device.main.Connection", Connection)


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch, outside: None) -> Iterator[Init]:
    """Init with a running client."""
    start = subprocess.Popen

    def client(*_: object, **__: object) -> subprocess.Popen[bytes]:
        child = start([sys.executable, "-c", SLOW_GOODBYE], stdout=subprocess.PIPE)
        assert child.stdout is not None
        with child.stdout:
            child.stdout.readline()
        return child

    monkeypatch.setattr(subprocess, "Popen", client)
    init = Init(CONFIG)
    init._start()
    yield init
    init._machine.close()
    if init._client is not None:
        init._client.kill()
        init._client.wait()


def pid(init: Init) -> int | None:
    """Return the process id of the client after one pass of init's loop; None if it does not run."""
    assert init._exit_code() is None
    return None if init._client is None else init._client.pid


@pytest.mark.parametrize("pause", [0.0, 0.05])
@pytest.mark.parametrize(
    ("ends", "begins"),
    [(Crash(), Restart()), (Leave(), Join())],
)
def test_client_restarts_at_once_when_ordered(
    init: Init, ends: Switching, begins: Switching, pause: float
) -> None:
    old = pid(init)
    init._do(ends)
    time.sleep(pause)
    init._do(begins)
    init._do(Pause())  # not the old one, which would never end
    eventually(lambda: pid(init) not in (old, None))
    new = pid(init)
    eventually(lambda: psutil.Process(new).status() == psutil.STATUS_STOPPED)
    init._do(Resume())
    init._do(Restart())
    assert pid(init) == new  # it is there


def test_client_killed_before_its_restart_stays_down(init: Init) -> None:
    for action in (Crash, Restart, Crash):
        init._do(action())
    eventually(lambda: pid(init) is None)


def test_rejoining_client_is_neither_paused_nor_disconnected(init: Init, cables: list[bool]) -> None:
    for action in (Disconnect, Pause, Crash):
        init._do(action())
    eventually(lambda: pid(init) is None)
    init._do(Join())
    assert cables == [False, True]
    assert psutil.Process(pid(init)).status() != psutil.STATUS_STOPPED


def test_container_ends_when_its_client_exits_unexpectedly(init: Init) -> None:
    assert init._client is not None
    init._client.kill()
    eventually(lambda: init._exit_code() == 128 + signal.SIGKILL)


def test_failed_order_is_reported(init: Init, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise link.LinkError("no tbf")

    monkeypatch.setattr(link, "apply", fails)
    order = messages.encode(messages.DeviceOrder("pi", SetLink({"up": 1_000_000})))
    init._carry_out(ReceivedMessage("testbed/r/control/pi", order, 0))
    assert isinstance(init._connection, Connection)
    assert init._connection.published == [("testbed/r/failure/pi", b"no tbf")]


def test_unreadable_order_is_reported_and_the_client_continues(init: Init) -> None:
    before = pid(init)
    for payload in (
        b"[" * 60_000,
        b'{"device": "nano", "action": {"action": "crash"}}',
        b'{"do": "start"}',
    ):
        init._carry_out(ReceivedMessage("testbed/r/control/pi", payload, 0))
    assert pid(init) == before
    assert init._refusals.count == 3
    assert isinstance(init._connection, Connection)
    assert [topic for topic, _ in init._connection.published] == ["testbed/r/failure/pi"] * 3
    assert b"found nano, expected" in init._connection.published[1][1]


def test_client_starts_only_after_the_device_is_isolated(
    monkeypatch: pytest.MonkeyPatch, outside: None, tmp_path: Path
) -> None:
    isolated = tmp_path / "isolated"
    started: list[bool] = []
    monkeypatch.setattr(Init, "_start", lambda *_: started.append(isolated.exists()))
    init = Init(replace(CONFIG, isolated=str(isolated)))
    launch = threading.Timer(4 * CONFIG.timeout_s, isolated.touch)
    launch.start()
    with pytest.raises(AttributeError, match="open"):  # it goes on to the broker
        init.run()
    launch.join()
    assert started == [True]

    isolated.unlink()
    end = threading.Timer(0.1, init._stop, (signal.SIGTERM, None))
    end.start()
    assert init.run() == 0
    end.join()
    init._machine.close()
    assert started == [True]


def test_client_inherits_its_turn(
    monkeypatch: pytest.MonkeyPatch, outside: None, tmp_path: Path
) -> None:
    """The init closes its own descriptor, so that the client ends the turn."""
    init = Init(replace(CONFIG, turns=str(tmp_path)))
    started: list[tuple[str, Path]] = []

    def start(command: Sequence[str], inherited: Sequence[int]) -> None:
        started.append((command[-1], Path(f"/proc/self/fd/{inherited[0]}").readlink()))

    monkeypatch.setattr(init._machine, "start", start)
    file = tmp_path / turns.names(1)[0]
    file.touch()
    turn = init._take_turn()
    init._start_wanted(turn)
    init._machine.close()
    assert started == [(str(turn), file)]
    assert not Path(f"/proc/self/fd/{turn}").is_symlink()


def test_client_stopped_from_outside_is_reported(init: Init, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "has_carrier", lambda _: True)
    client = psutil.Process(pid(init))
    assert init._present_disturbances(10.0) == {}
    client.suspend()
    eventually(lambda: client.status() == psutil.STATUS_STOPPED)
    assert init._present_disturbances(11.0) == {}
    assert init._present_disturbances(14.0) == {"the client of pi was stopped by a signal": 11.0}
    client.resume()
    eventually(lambda: client.status() != psutil.STATUS_STOPPED)
    assert init._present_disturbances(15.0) == {}
    init._do(Pause())
    eventually(lambda: client.status() == psutil.STATUS_STOPPED)
    assert init._present_disturbances(16.0) == init._present_disturbances(20.0) == {}


def test_interface_disabled_from_outside_is_reported(
    init: Init, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "has_carrier", lambda _: False)
    assert init._present_disturbances(11.0) == {}
    assert init._present_disturbances(14.0) == {
        "the network interface of pi was cut off from outside": 11.0
    }
    init._do(Disconnect())
    assert init._present_disturbances(15.0) == {}


def test_network_without_any_reply_is_reported(init: Init, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "has_carrier", lambda _: True)
    found = [TcpConnection(0, 7.9)]
    container = init._machine
    assert isinstance(container, DeviceContainer)
    monkeypatch.setattr(container._link._netlink, "connections", lambda: found)
    assert init._present_disturbances(100.0) == {}
    found[:] = [TcpConnection(0, 8.5)]
    assert init._present_disturbances(100.0) == {"nothing came back to pi over its network": 91.5}
    container._link._link = AccessLink(up=1_000_000, down=16_000)  # its queue takes 9 s
    assert init._present_disturbances(100.0) == {}


ERASED: list[str] = []
"""Devices whose files were erased."""


@pytest.fixture
def battery(init: Init, monkeypatch: pytest.MonkeyPatch) -> Init:
    """Init of a device with a battery of 1000 J, whose run clock runs."""
    cell = BatteryConfig(capacity=1000.0, power_off_at=0.1, return_at=0.5, loses_memory=True)
    config = EnergyConfig(idle=0.0, busy=0.0, battery=cell)
    energy = EnergyInit(init, config, cpu=0.5)
    energy.obey(EnergyStart("pi", time.monotonic()))
    init._features = [energy]
    init._look()
    monkeypatch.setattr(init, "_erase_memory", lambda: ERASED.append("pi"))
    ERASED.clear()
    return init


def switches(init: Init) -> list[bool]:
    """Power-offs (False) and returns (True) that init has reported."""
    published = init._connection.published  # type: ignore[attr-defined]
    found = [messages.decode(init._topics, topic, payload) for topic, payload in published]
    return [one.powered for one in found if isinstance(one, PowerSwitch)]


def test_client_is_killed_when_its_battery_is_empty(battery: Init) -> None:
    client = battery._client
    assert client is not None
    battery._do(SetBattery(0.05))
    assert client.wait(120) == -signal.SIGKILL
    battery._do(Restart())  # it waits for the power
    eventually(lambda: pid(battery) is None)
    assert switches(battery) == [False]
    battery._do(PowerOn())  # an order that is older than the power-off
    assert pid(battery) is None
    battery._do(SetBattery(0.5))
    assert switches(battery) == [False, True]
    assert pid(battery) is None  # the controller lifts the CPU limit first
    battery._do(PowerOn())
    assert pid(battery) is not None
    assert ERASED == ["pi"]


def test_crashed_client_does_not_start_when_its_power_returns(battery: Init) -> None:
    battery._do(SetBattery(0.05))
    battery._do(Crash())
    eventually(lambda: pid(battery) is None)
    battery._do(SetBattery(0.9))
    battery._do(PowerOn())
    assert pid(battery) is None
    battery._do(Restart())
    assert pid(battery) is not None


def test_files_are_erased_except_the_count_of_trainings(
    init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("memory.safetensors", "7.update", "begun"):
        (tmp_path / name).touch()
    monkeypatch.undo()  # the stand-in for the client
    init._config = replace(CONFIG, disk=str(tmp_path))
    assert isinstance(init._machine, DeviceContainer)
    init._machine._user = os.getuid()
    init._erase_memory()
    assert [path.name for path in tmp_path.iterdir()] == ["begun"]

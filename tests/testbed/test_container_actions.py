"""Actions during the life of devices in containers, with a list in place of the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.device_actions import (
    Crash,
    DeviceAction,
    Disconnect,
    Join,
    Leave,
    Pause,
    PowerOff,
    PowerOn,
    Reconnect,
    Restart,
    Resume,
    SetCpu,
    SetLink,
)
from agents.energy.messages import Charge, SetBattery, Unplug
from agents.wire.messages import DeviceOrder
from testbed.errors import BadInputError, HostError
from testbed.plan import HostResources, plan
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.docker.container_actions import ContainerDevice, ContainerDevices, respond
from testbed.runtimes.docker.specifications import UNLIMITED, CpuLimits, planned_limits, starting_limits
from testbed.topology import parse

_ACTIONS = st.sampled_from(
    [
        *(Crash(), Restart(), Leave(), Join(), Pause(), Resume(), Disconnect(), Reconnect()),
        *(SetCpu(0.1), SetCpu(0.5), SetLink({"up": 1e6})),
        *(PowerOff(), PowerOn(), SetBattery(0.2), Charge(), Unplug()),
    ]
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """Plan with the devices d-1 and d-2, and with `late`, which joins during the run."""
    topology = parse(
        "name: t\ntask: {name: digits-logreg, local: {steps: 1}}\nrule: {name: fedavg}\n"
        "devices: [{name: d, count: 2, cpu: 0.2}, {name: late, cpu: 0.1}]\nstop: {after: 10s}\n"
        "scenario: [{at: 5s, join: late}]\n"
    )
    directory = RunDirectory.create(tmp_path_factory.mktemp("runs"), "actions")
    return RunSpec(directory, topology, plan(topology, "docker", HostResources((0, 1), 2**34)), {})


def limits(spec: RunSpec, device: ContainerDevice, *actions: DeviceAction) -> list[CpuLimits | None]:
    """Return the container's limits after each of `actions`, done one after the other."""
    found = []
    for action in actions:
        response = respond(spec, device, action)
        device = response.device
        found.append(response.limits)
    return found


def test_only_stopped_containers_start_without_a_quota(spec: RunSpec) -> None:
    here = ContainerDevice(spec.plan.devices[0], away=False)
    assert limits(spec, here, Restart(), Pause(), Join()) == [None, None, None]
    assert limits(spec, replace(here, away=True), Join(), Join()) == [UNLIMITED, None]
    assert limits(spec, here, Crash(), Restart(), Restart()) == [None, UNLIMITED, None]
    assert limits(spec, here, Leave(), Join(), Join()) == [None, UNLIMITED, None]


def test_changed_share_sets_a_new_quota(spec: RunSpec) -> None:
    device = ContainerDevice(spec.plan.devices[0], away=False)
    response = respond(spec, device, SetCpu(0.5))
    assert response.limits == CpuLimits(quota=5000, period=10_000, weight=5000, cpus="1")
    assert response.orders == []
    assert response.device.planned.cpu == 0.5
    lower = CpuLimits(quota=5000, period=50_000, weight=1000, cpus="1")
    assert limits(spec, response.device, SetCpu(0.1)) == [lower]


def test_other_actions_are_sent_to_the_device(spec: RunSpec) -> None:
    device = ContainerDevice(spec.plan.devices[0], away=False)
    for action in (Crash(), Join()):
        assert respond(spec, device, action).orders == [("d-1", DeviceOrder("d-1", action))]


class Engine:
    """Devices, and the calls to the engine with their results."""

    def __init__(self, spec: RunSpec) -> None:
        self.told: list[tuple[str, CpuLimits]] = []
        self.ended: dict[str, int] = {}
        self.refuses = False
        self.devices = ContainerDevices(spec, self.ended.get, self._set)

    def _set(self, name: str, limits: CpuLimits, memory: int) -> None:
        if self.refuses:
            raise HostError("refused")
        self.told.append((name, limits))


def test_unlimited_container_is_limited_when_it_becomes_ready(spec: RunSpec) -> None:
    """It becomes ready during the run, and must not take CPU from the others."""
    engine = Engine(spec)
    engine.devices.limit("d-1")
    assert engine.told == [("d-1", planned_limits(spec.plan.devices[0]))]
    engine.devices.begin()
    later = {one.name: starting_limits(one) for one in spec.plan.devices if one.name != "d-1"}
    assert dict(engine.told[1:]) == later
    engine.devices.begin()
    assert len(engine.told) == 3


def test_device_that_joins_later_is_absent_until_its_join(spec: RunSpec) -> None:
    engine = Engine(spec)
    away = {name: device.away for name, device in engine.devices.states.items()}
    assert away == {"d-1": False, "d-2": False, "late": True}
    assert [order for order, _ in engine.devices.act("late", Join())] == ["late"]
    assert not engine.devices.states["late"].away
    assert engine.told == [("late", UNLIMITED)]
    engine.devices.begin()
    assert "late" not in dict(engine.told[1:])


@given(st.lists(_ACTIONS, max_size=8))
def test_actions_affect_only_their_device(spec: RunSpec, actions: list[DeviceAction]) -> None:
    engine = Engine(spec)
    before = dict(engine.devices.states)
    device = before["d-1"]
    told = []
    for action in actions:
        expected = respond(spec, device, action)
        assert engine.devices.act("d-1", action) == expected.orders
        device = expected.device
        told += [("d-1", expected.limits)] if expected.limits else []
    assert engine.told == told
    assert engine.devices.states == before | {"d-1": device}


@given(st.lists(_ACTIONS, max_size=4), st.sampled_from([SetCpu(0.5), SetCpu(0.1)]))
def test_changed_share_stays_in_force(spec: RunSpec, later: list[DeviceAction], share: SetCpu) -> None:
    engine = Engine(spec)
    engine.devices.act("d-1", share)
    for action in later:
        engine.devices.act("d-1", action)
    shares = [action.cpu for action in later if isinstance(action, SetCpu)]
    engine.devices.limit("d-1")
    assert engine.devices.states["d-1"].planned.cpu == [share.cpu, *shares][-1]
    assert engine.told[-1][1].weight == round(10_000 * [share.cpu, *shares][-1])


@pytest.mark.parametrize("action", [SetCpu(0.5), Join()])
def test_share_refused_by_the_engine_is_forgotten(spec: RunSpec, action: DeviceAction) -> None:
    engine = Engine(spec)
    before = dict(engine.devices.states)
    engine.refuses = True
    with pytest.raises(HostError):
        engine.devices.act("late", action)
    assert engine.devices.states == before
    engine.refuses = False
    engine.devices.begin()
    assert dict(engine.told) == {name: starting_limits(one.planned) for name, one in before.items()}


@pytest.mark.parametrize("action", [Restart(), Join()])
def test_ended_container_does_not_start_again(spec: RunSpec, action: DeviceAction) -> None:
    """It does not prevent others from starting, nor the order to stop from reaching it."""
    engine = Engine(spec)
    engine.devices.act("d-1", Crash())
    engine.devices.act("d-2", Crash())
    engine.ended["d-1"] = 137
    with pytest.raises(BadInputError, match=r"d-1 cannot restart.*exit code 137"):
        engine.devices.act("d-1", action)
    assert engine.devices.states["d-1"] == ContainerDevice(spec.plan.devices[0], away=True)
    assert engine.told == []
    assert engine.devices.act("d-2", action)
    assert engine.told == [("d-2", UNLIMITED)]
    assert engine.devices.act("d-1", Leave())


def test_client_starts_without_limits_when_its_power_returns(spec: RunSpec) -> None:
    engine = Engine(spec)
    assert engine.devices.act("d-1", PowerOff()) == []  # the init has ended the client itself
    assert engine.devices.act("d-1", PowerOn()) == [("d-1", DeviceOrder("d-1", PowerOn()))]
    assert engine.told == [("d-1", UNLIMITED)]


def test_crash_and_empty_battery_do_not_end_each_other(spec: RunSpec) -> None:
    """A client that does not start keeps its limits, so that it is limited when it starts later."""
    engine = Engine(spec)
    actions: list[DeviceAction] = [Crash(), PowerOff(), PowerOn(), PowerOff(), Restart()]
    for action in actions:
        engine.devices.act("d-1", action)
    assert engine.told == []
    engine.devices.act("d-1", PowerOn())
    assert engine.told == [("d-1", UNLIMITED)]

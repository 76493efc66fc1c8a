"""Requested state of devices, from plan and events; and orders on their way to the controller."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents import events
from agents.config import AccessLink, Segment
from agents.device_actions import (
    Action,
    Crash,
    Disconnect,
    Join,
    Leave,
    Pause,
    Reconnect,
    Restart,
    Resume,
    SetBackground,
    SetCpu,
    SetLink,
)
from agents.timing.nanoseconds import from_seconds
from agents.wire import messages
from agents.wire.messages import AddressedOrder
from testbed.api.handle import RunHandle
from testbed.errors import BadInputError
from testbed.fidelity import requested
from testbed.fidelity.figures import RequestedCpu, RequestedLimits, RequestedLink
from testbed.plan import HostResources, plan
from testbed.plan.agent_configs import RunSpec
from testbed.run.inputs import Act, ControllerPhase
from testbed.run.part import ControlledRun
from testbed.run.scenario_player import ScenarioPlayer, parse_command
from testbed.rundir import live_files
from testbed.rundir.directory import RunDirectory
from testbed.segments.controlled import ControlledSegments
from testbed.topology import parse
from testbed.topology.scenario import Step

TOPOLOGY = """
name: asked
task: {name: digits-logreg, local: {steps: 1}}
rule: {name: fedbuff, buffer_size: 1}
devices:
  - {name: a, cpu: 0.2, link: {up: 1mbit, rtt: 80ms}}
  - {name: b, cpu: 0.1}
scenario:
  - {at: 9s, join: b}
stop: {after: 60s}
"""


def _spec(folder: Path) -> RunSpec:
    topology = parse(TOPOLOGY)
    planned = plan(topology, "docker", HostResources((0, 1), 2**34))
    return RunSpec(RunDirectory.create(folder, "asked"), topology, planned, {"a": 1, "b": 1})


def _acted(at: float, device: str, lateness: float = 0.0, **details: Any) -> events.Acted:
    return events.Acted(at, device, "scenario", lateness, details)


def test_changes_and_absences_are_in_device_time(tmp_path: Path) -> None:
    spec = _spec(tmp_path)
    records: list[events.Record] = [
        _acted(5.0, "a", action="set", cpu=0.5),
        _acted(6.0, "a", action="set", link={"up": 2_000_000}),
        _acted(7.25, "a", 0.25, action="pause"),
        _acted(8.0, "a", action="resume"),
        events.ClientStatus(12.0, "b", "ready"),
        _acted(20.0, "b", action="crash"),
        events.ClientStatus(20.1, "b", "offline"),
    ]
    a, b = requested.devices(spec, records)
    fifth = RequestedLimits(quota=5_000, period=25_000, shares=2_000, cpus="1", memory=512 * 2**20)
    half = replace(fifth, period=10_000, shares=5_000)
    assert a.cpu == (RequestedCpu(0.2, 0.025, 0.0, fifth), RequestedCpu(0.5, 0.01, 5.0, half))
    assert a.link == (RequestedLink(up=1e6, delay=0.04), RequestedLink(up=2e6, delay=0.04, at=6.0))
    assert a.away == ((7.0, 8.0),)
    assert b.away == ((0.0, 12.0), (20.0, float("inf")))
    assert [(s.what, s.due, s.done) for s in requested.steps(records)][2] == ("pause of a", 7.0, 7.25)
    assert requested.devices(spec, [])[0].link == (RequestedLink(up=1e6, delay=0.04),)
    assert spec.topology.devices[0].link is not None
    assert spec.topology.devices[0].link.plain() == AccessLink(up=1_000_000, rtt=0.08)


def test_resumed_run_starts_with_planned_devices(tmp_path: Path) -> None:
    """Settings made by hand are not applied again."""
    spec = _spec(tmp_path)
    a, _ = requested.devices(
        spec,
        [
            events.RunStarted(0.0, 1e9, ("a",), ("b",)),
            _acted(5.0, "a", action="set", cpu=0.5),
            _acted(6.0, "a", action="set", link={"up": 2_000_000}),
            _acted(7.0, "a", action="pause"),
            events.RunStarted(10.0, 1e9 + 60, ("a",), ("b",)),
        ],
    )
    assert a.cpu[-1] == replace(a.cpu[0], at=10.0)
    assert (a.cpu[-1].share, a.cpu[-1].period) == (0.2, 0.025)
    assert a.link[-1] == RequestedLink(up=1e6, delay=0.04, at=10.0)
    assert a.away == ((7.0, 10.0),)


def test_device_that_was_down_works_after_a_resume(tmp_path: Path) -> None:
    """The run clock starts only when it is ready, so that no status tells it. A device that rejoins is
    not held by what was done before."""
    spec = _spec(tmp_path)
    a, b = requested.devices(
        spec,
        [
            events.RunStarted(0.0, 1e9, ("a",), ("b",)),
            events.ClientStatus(5.0, "a", "offline"),
            events.ClientStatus(6.0, "b", "ready"),
            events.RunStarted(10.0, 1e9 + 60, ("a",), ("b",)),
            events.ClientStatus(12.0, "b", "ready"),
            _acted(15.0, "a", action="pause"),
            _acted(16.0, "a", action="leave"),
            _acted(18.0, "a", action="join"),
            events.ClientStatus(19.0, "a", "ready"),
        ],
    )
    assert a.away == ((5.0, 10.0), (15.0, 18.0), (16.0, 19.0))
    assert b.away == ((0.0, 6.0), (10.0, 12.0))


def _step(at: float, device: str, action: Action) -> Step:
    return Step(from_seconds(at), device, action)


class Played:
    """A scenario player, and the actions that it has had done."""

    def __init__(
        self, folder: Path, steps: Iterable[Step], *, epoch: float | None = 0.0, cell: str | None = None
    ) -> None:
        spec = _spec(folder)
        if cell is not None:
            spec = replace(spec, plan=replace(spec.plan, segments={cell: Segment(cell)}))
        self.run = ControlledRun(spec)
        self.run.phase, self.run.epoch = ControllerPhase.RUNNING, epoch
        self.player = ScenarioPlayer(self.run, [ControlledSegments(self.run)], iter(steps))

    @property
    def acts(self) -> list[tuple[str, Action]]:
        return [(one.device, one.action) for one in self._acts()]

    def _acts(self) -> list[Act]:
        return [action for action in self.run.actions if isinstance(action, Act)]

    def all_done(self, at: float) -> list[AddressedOrder]:
        """The runtime has done its part of each action; return all orders."""
        for act in self._acts():
            self.player.done(act, [(act.device, messages.DeviceOrder(act.device, Crash()))], at)
        orders, self.run.orders, self.run.actions = self.run.orders, [], []
        return orders


def test_director_executes_and_logs_due_steps(tmp_path: Path) -> None:
    played = Played(tmp_path, [_step(0.0, "a", Crash()), _step(1e6, "b", Crash())], epoch=None)
    played.player.tick(5.0)
    assert played.acts == []  # the run clock has not started
    played.run.epoch = 4.0
    played.player.start(0.0, 5.0)
    played.player.tick(5.0)
    assert played.acts == [("a", Crash())]
    told = played.all_done(5.5)
    assert told[0] == ("a", messages.DeviceOrder("a", Crash()))
    part, logged = told[1]
    assert isinstance(logged, messages.LogOrder)
    assert (part, logged.details) == ("aggregator", {"action": "crash"})
    assert logged.lateness == logged.at == 1.5
    played.player.execute({"device": "b", "action": "set", "cpu": 0.5}, 6.0)
    by_hand = played.all_done(6.5)[-1][1]
    assert isinstance(by_hand, messages.LogOrder)
    assert (by_hand.source, by_hand.lateness, by_hand.at) == ("hand", 0.0, 2.5)


def test_resumed_run_restores_device_states(tmp_path: Path) -> None:
    steps = [
        _step(1.0, "a", SetCpu(0.5)),
        _step(2.0, "a", Crash()),
        _step(3.0, "late", Join()),
        _step(4.0, "a", Restart()),
        _step(5.0, "a", SetCpu(0.1)),
        _step(6.0, "b", Pause()),
        _step(7.0, "late", Crash()),
        _step(8.0, "late", Restart()),
        _step(9.0, "c", Disconnect()),
        _step(9.5, "c", Reconnect()),
        _step(9.6, "back", Pause()),
        _step(9.7, "back", Leave()),
        _step(9.8, "back", Join()),
        *(_step(at, "traced", SetLink({"up": 1000 * at})) for at in range(10)),
        _step(9.6, "traced", SetLink({"rtt": 0.5})),
        _step(20.0, "b", Resume()),
    ]
    played = Played(tmp_path, steps, epoch=100.0)
    played.player.start(10.0, 110.0)
    played.player.tick(110.0)
    assert played.acts == [
        ("a", SetCpu(0.1)),
        ("b", Pause()),
        ("late", Restart()),
        ("back", Join()),
        ("traced", SetLink({"up": 9000, "rtt": 0.5})),  # not every step of a long trace
    ]
    assert played.player.next_due == 120.0


def test_background_of_a_device_is_refused_and_the_run_continues(tmp_path: Path) -> None:
    steps = [_step(1.0, "a", SetBackground(on=False)), _step(2.0, "cell", SetBackground(on=False))]
    played = Played(tmp_path, steps, cell="cell")
    played.player.tick(5.0)
    (failure,) = played.run.failures
    assert "a is a device" in failure
    with pytest.raises(BadInputError, match="cell is a segment"):
        played.player.execute({"device": "cell", "action": "crash"}, 5.0)
    assert played.acts == []
    order = messages.DeviceOrder("cell", SetBackground(on=False))
    assert ("router", order) in played.run.orders


def test_orders_are_parsed() -> None:
    assert parse_command({"device": "a", "action": "set", "cpu": 0.5}) == ("a", SetCpu(0.5))
    assert parse_command({"device": "a", "action": "set", "link": {"up": 1}}) == (
        "a",
        SetLink({"up": 1}),
    )
    assert parse_command({"device": "a", "action": "crash"}) == ("a", Crash())
    with pytest.raises(BadInputError, match="has no action 'dance'"):
        parse_command({"device": "a", "action": "dance"})


def test_order_is_answered_and_a_refusal_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_files, "_ANSWER_TIMEOUT_SECONDS", 120.0)  # a busy host is no failure
    directory = RunDirectory.create(tmp_path, "asked")
    served = threading.Event()
    obeyed: list[dict[str, Any]] = []
    ticks: list[int] = []
    group = [f"b-{number}" for number in range(12)] + ["c", "d"]

    def obey(order: dict[str, Any]) -> None:
        obeyed.append(order)
        if order["device"] == "c":
            raise BadInputError("no device c")

    def serve() -> None:
        while not served.wait(0.1):  # a controller's tick
            before = len(obeyed)
            box.serve(obey)
            ticks.append(len(obeyed) - before)

    with pytest.raises(BadInputError, match="is not running"):
        live_files.send_command(directory, {"device": "a"})
    directory.claim()
    for runtime, said in (("virtual", "in virtual time"), ("process", "not started its devices yet")):
        directory.write_manifest(runtime=runtime)
        with pytest.raises(BadInputError, match=said):
            live_files.send_command(directory, {"device": "a"})
    box = live_files.CommandFolder(directory.orders)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        live_files.send_command(directory, {"device": "a"})
        with pytest.raises(BadInputError, match="no device c"):
            live_files.send_command(directory, {"device": "c"})
        with pytest.raises(BadInputError, match="no device c"):
            live_files.send_command(directory, *({"device": name} for name in group))
        assert max(ticks) > 1, "one device a tick"
        directory.write_manifest(devices={"e-1": {"group": "e"}, "e-2": {"group": "e"}})
        assert [done["device"] for done in RunHandle(directory).kill(["e-2", "e"])] == ["e-2", "e-1"]
    finally:
        served.set()
        thread.join()
    assert [order["device"] for order in obeyed] == ["a", "c", *group, "e-2", "e-1"]
    assert list(directory.orders.iterdir()) == []

"""Effects of actions on one device in virtual time, with a world that records them. Times in seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from agents import events
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
    SetCpu,
    SetLink,
)
from agents.rules.client_half import SavedVectors
from agents.rules.interface import ClientSide
from agents.timing.nanoseconds import SECOND, Nanoseconds
from agents.wire import payloads
from testbed.virtual import faults
from testbed.virtual.device import OngoingTraining, VirtualDevice
from testbed.virtual.timing import DEVICE, SCENARIO, EventQueue
from tests.testbed import devices

Told = list[tuple[float, str]]


class World:
    """Has one device, `a`."""

    def __init__(
        self, side: ClientSide | None = None, memory: SavedVectors | None = None, start: float = 0.0
    ) -> None:
        self.queue = EventQueue()
        self.start = start
        self.lives = [devices.device(self.queue, side, memory)]
        self.told: Told = []
        self.works: list[OngoingTraining] = []

    def device(self, name: str) -> VirtualDevice:
        return self.lives[-1]

    def new_device(self, name: str) -> VirtualDevice:
        line = self.lives[-1].line
        self.lives.append(devices.device(self.queue, line=line, start=self.start))
        return self.lives[-1]

    def report_status(self, name: str, state: str) -> None:
        self.told.append((self.queue.now / SECOND, state))

    @property
    def now(self) -> Nanoseconds:
        return self.queue.now

    def send_last(
        self,
        device: VirtualDevice,
        messages: Sequence[payloads.UpdateMessage],
        on_gone: Callable[[], None],
    ) -> None:
        def passes() -> None:
            for word in messages:
                self.told.append((self.now / SECOND, f"{word.kind} {word.vector[0]:g}"))
            on_gone()

        if device.is_cut_off:
            device.held_by_network.append(passes)
        else:
            passes()

    @property
    def names(self) -> Sequence[str]:
        return ["a"]

    def stop_features(self, device: VirtualDevice) -> None:
        """Do nothing: the devices have no features."""

    def check(self, name: str) -> None:
        """Do nothing: the devices have no features."""

    def write(self, record: events.Record) -> None: ...

    def when_reachable(self, device: VirtualDevice, callback: Callable[[], None]) -> None:
        def due() -> None:
            if device.alive:
                callback()

        if device.is_cut_off:
            device.held_by_network.append(due)
        elif device.frozen_at is not None:
            device.held_by_pause.append(due)
        else:
            due()

    def call_at(self, time: Nanoseconds, device: VirtualDevice, callback: Callable[[], None]) -> None:
        self.queue.plan(time, DEVICE, 0, callback)

    def set_work(self, device: VirtualDevice, work: OngoingTraining) -> None:
        device.working_on = work
        self.works.append(work)

    def play(self, *steps: tuple[float, DeviceAction], until: float = 1000) -> Told:
        for at, action in steps:
            time = int(at * SECOND)
            self.queue.plan(time, SCENARIO, 0, self._acts(action, time))
        devices.play(self.queue, int(until * SECOND))
        return self.told

    def _acts(self, action: DeviceAction, now: Nanoseconds) -> Callable[[], None]:
        return lambda: faults.act(self, "a", action, now)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(2, Crash())], [(2, "offline")]),
        ([(2, Crash()), (3, Crash())], [(2, "offline")]),
        ([(2, Leave()), (3, Leave())], [(2, "offline")]),
        ([(2, Restart()), (3, Join())], []),  # it is there
        ([(2, Crash()), (3, Restart())], [(2, "offline"), (3, "joining"), (3, "ready")]),
        ([(2, Leave()), (3, Join())], [(2, "offline"), (3, "joining"), (3, "ready")]),
        # What freezes the device outlives its process, and what begins then waits for its end.
        (
            [(2, Pause()), (3, Crash()), (4, Restart()), (5, Resume())],
            [(3, "offline"), (5, "joining"), (5, "ready")],
        ),
        ([(2, Pause()), (3, Crash()), (4, Join())], [(3, "offline"), (4, "joining"), (4, "ready")]),
        # So does what cuts it off: the end of the first life is heard with the beginning of the next.
        (
            [(2, Disconnect()), (3, Crash()), (4, Restart()), (5, Reconnect())],
            [(5, "offline"), (5, "joining"), (5, "ready")],
        ),
        (
            [(2, Disconnect()), (3, Leave()), (4, Join())],
            [(4, "offline"), (4, "joining"), (4, "ready")],
        ),
    ],
)
def test_devices_start_crash_and_restart(steps: list[tuple[float, DeviceAction]], told: Told) -> None:
    assert World().play(*steps) == told


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(2, Crash()), (3, Restart())], [(2, "offline"), (6, "joining"), (6, "ready")]),
        ([(2, Leave()), (3, Join())], [(2, "offline"), (6, "joining"), (6, "ready")]),
        ([(2, Crash()), (3, Restart()), (5, Crash())], [(2, "offline"), (5, "offline")]),
        (
            [(2, Crash()), (3, Restart()), (4, Disconnect()), (9, Reconnect())],
            [(2, "offline"), (9, "joining"), (9, "ready")],
        ),
    ],
)
def test_client_start_takes_time(steps: list[tuple[float, DeviceAction]], told: Told) -> None:
    assert World(start=3.0).play(*steps) == told


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(2, Disconnect()), (46, Reconnect())], []),
        ([(2, Disconnect()), (48, Reconnect())], [(47, "offline"), (48, "ready")]),
        ([(2, Pause()), (48, Resume())], [(47, "offline"), (48, "ready")]),
        # It is ready once.
        (
            [(2, Pause()), (48, Resume()), (49, Resume()), (50, Reconnect())],
            [(47, "offline"), (48, "ready")],
        ),
        # Silence begins with the first of two, and ends with the last.
        (
            [(2, Disconnect()), (22, Pause()), (50, Reconnect()), (51, Resume())],
            [(47, "offline"), (51, "ready")],
        ),
        (
            [(2, Pause()), (22, Disconnect()), (50, Resume()), (51, Reconnect())],
            [(47, "offline"), (51, "ready")],
        ),
        # A new silence counts anew.
        (
            [(2, Disconnect()), (4, Reconnect()), (10, Disconnect())],
            [(55, "offline")],
        ),
        # Who is given up on already ends unheard,
        ([(2, Disconnect()), (48, Crash()), (49, Reconnect())], [(47, "offline")]),
        # and who has ended is not given up on.
        ([(2, Pause()), (3, Crash())], [(3, "offline")]),
        ([(2, Disconnect()), (3, Crash())], [(47, "offline")]),
        ([(2, Disconnect()), (3, Crash()), (4, Reconnect())], [(4, "offline")]),
        ([(2, Disconnect()), (3, Crash()), (48, Reconnect())], [(47, "offline")]),
        # A life that begins in silence: that of the device counts.
        (
            [(2, Disconnect()), (3, Crash()), (4, Restart()), (5, Crash()), (80, Reconnect())],
            [(47, "offline"), (47, "offline")],
        ),
    ],
)
def test_broker_drops_a_silent_device_after_45_seconds(
    steps: list[tuple[float, DeviceAction]], told: Told
) -> None:
    assert World().play(*steps) == told


def test_link_with_full_loss_equals_no_link() -> None:
    lost, found = SetLink({"loss": 1.0}), SetLink({"loss": 0.0})
    assert World().play((2, lost), (46, found)) == []
    assert World().play((2, lost), (48, found)) == [(47, "offline"), (48, "ready")]
    assert World().play((2, lost), (3, Crash()), (4, found)) == [(4, "offline")]
    assert World().play((2, Disconnect()), (3, lost), (4, Reconnect()), (50, found)) == [
        (47, "offline"),
        (50, "ready"),
    ]
    again: list[tuple[float, DeviceAction]] = [
        (2, lost),
        (3, Crash()),
        (4, Join()),
        (5, SetLink({"rtt": 0.1})),
        (6, found),
    ]
    assert World().play(*again) == [(6, "offline"), (6, "joining"), (6, "ready")]


def test_link_of_almost_zero_rate_is_an_outage() -> None:
    """Below 1,000 bytes in 30 s a connection breaks."""
    slow: list[tuple[float, DeviceAction]] = [(2, SetLink({"up": 266})), (50, SetLink({"up": 267}))]
    assert World().play(*slow) == [(47, "offline"), (50, "ready")]
    assert World().play((2, SetLink({"up": 267})), (50, SetLink({"down": 1000}))) == []


def test_messages_in_flight_are_lost_when_the_broker_drops_a_device() -> None:
    world = World()
    (life,) = world.lives
    world.play((2, Disconnect()), until=46)
    life.line.upload(1, lambda _: world.told.append((0, "arrived")))
    life.held_by_network.append(lambda: world.told.append((0, "passed")))
    assert world.play((48, Reconnect())) == [(47, "offline"), (48, "ready")]


def test_second_pause_changes_nothing() -> None:
    world = World()
    world.play((2, Pause()), (3, Pause()), (4, Resume()))
    assert world.lives[0].lost_to_pauses == 2 * SECOND


def test_resume_of_a_running_device_changes_nothing() -> None:
    world = World()
    world.play((2, Resume()), (3, Disconnect()), (4, Resume()), until=5)
    (life,) = world.lives
    assert (life.lost_to_pauses, life.is_cut_off, life.silent_since) == (0, True, 3 * SECOND)


def test_restarted_client_respects_the_devices_holds() -> None:
    held = World()
    held.play((2, Disconnect()), (3, Pause()), (4, Crash()), (5, Restart()), until=6)
    first, second = held.lives
    assert (first.alive, second.alive) == (False, True)
    assert (second.is_cut_off, second.frozen_at) == (True, 5 * SECOND)
    assert (second.silent_since, second.held_by_network) == (2 * SECOND, first.held_by_network)
    joined = World()
    joined.play((2, Disconnect()), (3, Pause()), (4, Leave()), (5, Join()), until=6)
    second = joined.lives[1]
    assert (second.is_cut_off, second.frozen_at, second.silent_since) == (False, None, None)
    second.line.upload(1, lambda _: joined.told.append((6, "arrived")))
    joined.play()
    assert joined.told[-1] == (6, "arrived")


def test_farewell_is_delivered_before_the_end() -> None:
    ends = np.array([2.0], np.float32), np.array([3.0], np.float32)
    memory = {"applied": (1, ends[0]), "sent": (2, ends[1])}
    side = ClientSide(kind="residual")
    farewell = ["farewell 2", "farewell 3", "offline"]
    assert World(side, memory).play((2, Leave())) == [(2, said) for said in farewell]
    assert World(side, memory).play((2, Crash())) == [(2, "offline")]
    late = World(side, memory).play((2, Disconnect()), (3, Leave()), (4, Reconnect()))
    assert late == [(4, said) for said in farewell]
    assert World(side, memory).play((2, Disconnect()), (3, Leave())) == [(47, "offline")]
    waits = World(side, memory).play((2, Disconnect()), (3, Leave()), (4, Restart()), (5, Reconnect()))
    assert waits == [(5, said) for said in [*farewell, "joining", "ready"]]
    thawed = World(side, memory).play((2, Pause()), (3, Leave()), (4, Restart()))
    assert thawed[2:] == [(3, "offline"), (4, "joining"), (4, "ready")]


def _working(*, computed: float) -> World:
    world = World()
    world.lives[0].working_on = OngoingTraining(
        training=devices.Steps(1), started=0, since=0, computed=int(computed * SECOND), floor=0
    )
    return world


def test_half_the_share_doubles_the_remaining_time() -> None:
    world = _working(computed=10)
    world.play((4, SetCpu(0.25)))
    assert [work.end_time for work in world.works] == [16 * SECOND]
    assert world.lives[0].speed.computing(1) == 4 * SECOND
    paused = _working(computed=10)
    paused.play((3, Pause()), (4, SetCpu(0.25)), (5, Resume()), (6, SetCpu(0.5)))
    assert [work.end_time for work in paused.works] == [17 * SECOND, 10.5 * SECOND]


def test_share_does_not_change_finished_work() -> None:
    done = _working(computed=4)
    done.play((4, SetCpu(0.25)))
    crashed = _working(computed=10)
    crashed.play((3, Crash()), (4, SetCpu(0.25)))
    idle = World()
    idle.play((4, SetCpu(0.25)))
    assert done.works == crashed.works == idle.works == []
    assert idle.lives[0].speed.computing(1) == crashed.lives[0].speed.computing(1) == 4 * SECOND


def test_link_change_affects_messages_in_flight() -> None:
    world = World()
    world.lives[0].line.upload(1, lambda at: world.told.append((at, "arrived")))
    assert world.play((0, SetLink({"up": 800_000_000}))) == [(10, "arrived")]

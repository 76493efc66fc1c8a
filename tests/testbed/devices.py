"""Devices in virtual time without a run around them."""

from __future__ import annotations

import numpy as np

from agents.client import core as client
from agents.client.factory import Timing
from agents.config import AccessLink, LocalTraining
from agents.rules.client_half import SavedVectors
from agents.rules.interface import ClientSide
from testbed.plan import PlannedDevice
from testbed.plan.costs import StepCost, StepTime
from testbed.virtual.device import LazyTraining, VirtualDevice
from testbed.virtual.network import Line, VirtualNetwork
from testbed.virtual.timing import ComputeTimes, EventQueue
from tests.agents.helpers import client_rule


class Steps:
    """A training of which only the number of steps matters."""

    def __init__(self, steps: int) -> None:
        self.steps, self.work, self.due = steps, float(steps), 0

    def outcome(self) -> client.Outcome:
        raise NotImplementedError

    def shorten(self, steps: int) -> None:
        self.steps = steps

    def request_result(self) -> None:
        raise NotImplementedError


def device(
    queue: EventQueue,
    side: ClientSide | None = None,
    memory: SavedVectors | None = None,
    line: Line | None = None,
    start: float = 0.0,
) -> VirtualDevice:
    """One that takes a second for a step with a whole core, of which it has half, and a nanosecond for a
    byte to the server; to start, `start` seconds."""
    local = LocalTraining(steps=1)
    planned = PlannedDevice(
        name="a", group="a", cpu=0.5, memory=0, local=local, link=AccessLink(up=8_000_000_000)
    )
    rule = client_rule(side, local, memory=memory)

    def train(wanted: client.Train) -> LazyTraining:
        raise NotImplementedError

    return VirtualDevice(
        index=0,
        core=client.ClientCore(client.ClientIdentity("run", "a", 1), lambda *_: 0, rule),
        line=line or VirtualNetwork(queue, 0).line(planned),
        train=train,
        speed=ComputeTimes(planned, StepCost(time=StepTime(1.0), start=start)),
        timing=Timing(None, None, np.random.default_rng),
        memory=memory,
    )


def play(queue: EventQueue, until: int | None = None) -> None:
    """Execute planned events, to the end or up to a time."""
    while (time := queue.next) is not None and (until is None or time <= until):
        queue.now = time
        while (callback := queue.pop_due()) is not None:
            callback()

"""Real cores whose trainings, messages and processes go on one by one, in any order a test likes."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from hypothesis import Phase, settings

from agents import events
from agents.aggregator import actions as act
from agents.aggregator import inputs
from agents.client import core as client_core
from agents.client.core import ClientCore, ClientIdentity, Outcome, Trained
from agents.config import LocalTraining
from agents.models.vectors import Vector
from agents.pipeline.interface import ClientStep, PeerError
from agents.rules.client_half import ClientSettings, SavedVectors
from agents.rules.interface import RequestUpdate, Rule
from agents.secure.arithmetic import Grid, SecureRun
from agents.secure.party import Party
from agents.secure.step import Masking
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from agents.wire.messages import ReportRequest, UnmaskRequest
from agents.wire.payloads import Encoded, ModelMessage, UpdateMessage
from tests.agents.helpers import make_core, records, secure_step

random_lives = settings(phases=[phase for phase in Phase if phase is not Phase.explain])
"""Explaining which events matter takes minutes where a life is long; a shrunk one explains itself."""

_STEPS = 2


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the mask of `sender`."""

    sender: str
    payload: bytes


Message = ModelMessage | ReportRequest | UnmaskRequest | Share | str


@dataclass(slots=True)
class Device:
    """One client and what is under way from it and to it."""

    core: ClientCore | None = None
    """None while no process runs."""
    inbox: deque[Message] = field(default_factory=deque)
    """Models, requests, and shares of masks."""
    training: ModelMessage | None = None
    cut: bool = False
    outbox: deque[UpdateMessage] = field(default_factory=deque)
    memory: SavedVectors = field(default_factory=dict)
    """The client's memory on the disk."""
    party: Party | None = None
    """Key pair of the latest process under secure aggregation; its public key stays at the broker after
    the process."""

    @property
    def busy(self) -> bool:
        """Whether the client trains, or a message is in flight from or to it."""
        return bool(self.inbox or self.training or self.outbox)


class _Kept(Masking):
    """Masks, and in `sent`, by client and dispatch, what updates are without them."""

    def __init__(
        self,
        party: Party,
        grid: Grid,
        rng: Callable[[int], np.random.Generator],
        sent: dict[tuple[str, int], Vector],
    ) -> None:
        super().__init__(party, grid, rng)
        self._client, self._sent = party.name, sent

    def apply(self, progress: Vector, sequence: int, dispatch: int) -> Encoded:
        self._sent[self._client, dispatch] = self.as_sent(sequence, dispatch, progress)
        return super().apply(progress, sequence, dispatch)


class Fleet:
    """A run of the clients in `importance`, of all of which a process runs from the start.

    `progress` is what local training makes of a model, shape (d,); for a gradient rule it is minus the
    gradient. `log` holds all that the aggregator wanted, in order, and `models` w after each version.
    """

    def __init__(
        self,
        rule: Rule,
        importance: Mapping[str, float],
        progress: Callable[[str, Vector], Vector],
        dtype: type[np.floating[Any]] = np.float32,
        secure: SecureRun | None = None,
    ) -> None:
        w = np.full(1, 0.3, dtype)
        self.core, self.server = make_core(
            *(rule, None, w),
            importance=importance,
            steps=[] if secure is None else [secure_step(secure)],
            keeps_models=secure is not None,
        )
        self.sent: dict[tuple[str, int], Vector] = {}
        """Updates without their masks, by client and dispatch; empty without secure aggregation."""
        self._secure = secure
        self.devices = {name: Device() for name in importance}
        self.now = 0.0
        self.log: list[act.Action] = []
        self.models: list[bytes] = []
        self.accepted: list[tuple[str, int, float]] = []
        """Client, sequence number and time sent of every update that the rule took, in order."""
        self.arrived: list[UpdateMessage] = []
        self.taken: list[UpdateMessage] = []
        """Received updates that the rule accepted."""
        self.dispatched: dict[int, Vector] = {}
        """Model sent, by the number of the dispatch."""
        self._rule, self._side = rule, rule.client_side
        self._progress = progress
        for name in self.devices:
            self.start(name)
        self.execute(self.core.start(0.0, 0.0))
        self.end_instant()

    @property
    def _ns(self) -> Nanoseconds:
        return from_seconds(self.now)

    @property
    def records(self) -> list[events.Record]:
        return records(self.log)

    @property
    def alive(self) -> list[str]:
        """The clients whose process runs."""
        return [name for name, device in self.devices.items() if device.core is not None]

    # What can happen

    def start(self, name: str) -> None:
        """The process starts, with what is on its disk."""
        device = self.devices[name]
        steps: list[ClientStep] = []
        if self._secure is not None:
            party = device.party = Party("run", name, self._secure, self.server.w.size)
            for other in filter(None, (one.party for one in self.devices.values())):
                other.add_peer(name, party.public)
                party.add_peer(other.name, other.public)
            steps.append(_Kept(party, party.grid, partial(_rng, name), self.sent))
        settings = ClientSettings(
            local=LocalTraining(steps=_STEPS),
            sends_changes=bool(steps),
            as_sent=steps[0].as_sent if steps else None,
            memory=device.memory,
        )
        rule = self._rule.begin_client(settings)
        device.core = ClientCore(ClientIdentity("run", name, 10), lambda *_: 0, rule, steps)
        self.say(name, "joining")
        self.say(name, "ready")

    def crash(self, name: str) -> None:
        """The process dies, with all that was on its way to it; what it has sent may still arrive."""
        device = self.devices[name]
        device.core = device.training = None
        device.cut = False
        device.inbox.clear()
        self.say(name, "offline")

    def leave(self, name: str) -> None:
        """The process says goodbye and ends; of what it has sent before, nothing arrives any more."""
        device = self.devices[name]
        assert device.core is not None
        device.outbox.clear()
        self._obey(device, device.core.leave(self._ns))
        while device.outbox:
            self.hand_in(device.outbox.popleft())
        self.crash(name)

    def reconnect(self, name: str) -> None:
        """The connection breaks; the process lives and is back at once."""
        self.say(name, "offline")
        self.say(name, "ready")

    def connect_anew(self, name: str) -> None:
        """This client was cut off from a broker that has forgotten it: what was on its way is lost."""
        self.devices[name].inbox.clear()
        self.devices[name].outbox.clear()
        self.say(name, "ready")

    def lose_all(self) -> None:
        """Lose all messages in flight, and reconnect the aggregator."""
        for device in self.devices.values():
            device.inbox.clear()
            device.outbox.clear()
        self.execute(self.core.handle(inputs.Reconnected(self._ns, self._ns)))

    def start_anew(self) -> None:
        """Resume the run with new processes. Clients send the updates on their disks once more."""
        self.execute(self.core.handle(inputs.Suspended(self._ns, "1")))
        for device in self.devices.values():
            device.core = device.training = None
            device.cut = False
            device.inbox.clear()
        for name in self.devices:
            self.start(name)
        self.execute(self.core.handle(inputs.Started(self._ns, 0.0, 0)))

    def deliver(self, name: str) -> None:
        """The first message on its way to this client gets there."""
        device = self.devices[name]
        message = device.inbox.popleft()
        assert device.core is not None
        match message:
            case ModelMessage():
                self._obey(device, device.core.on_model(message, self._ns))
            case Share(sender, payload) if device.party is not None:
                with suppress(PeerError):  # sealed for the process that was here before, as it may be
                    device.party.receive_share(sender, payload)
            case UnmaskRequest(_, number, updates) if device.party is not None:
                answer = device.party.answer(number, updates)
                self.execute(self.core.handle(inputs.Answered(self._ns, name, answer)))
            case "pull":
                self._obey(device, device.core.pull(self._ns))
            case ReportRequest(_, about):
                while device.outbox:  # it comes after them
                    self.arrive(name)
                report = inputs.Reported(self._ns, name, device.core.works_on, about)
                self.execute(self.core.handle(report))
            case _:
                self._obey(device, device.core.interrupt(self._ns))

    def finish(self, name: str, *, diverged: bool = False) -> None:
        """End the client's training."""
        device = self.devices[name]
        assert device.core is not None
        assert device.training is not None
        start, device.training = device.training.vector, None
        steps, device.cut = 1 if device.cut else _STEPS, False
        progress = np.full_like(start, np.nan) if diverged else self._progress(name, start)
        outcome = Outcome(-progress if self._side.kind == "gradient" else start + progress, 0.5)
        trained = Trained(lambda: outcome, steps, self._ns, self._ns)
        self._obey(device, device.core.on_trained(trained))

    def arrive(self, name: str) -> bool:
        """The first update on its way from this client arrives; whether the rule took it."""
        message = self.devices[name].outbox.popleft()
        self.arrived.append(message)
        key, waiting = (name, message.dispatch), self.core.core._versions.arrivals
        is_repeated = key in waiting
        done = records(self.hand_in(message))
        applied = {(r.client, r.dispatch) for r in done if isinstance(r, events.UpdateApplied)}
        rejected = [r for r in done if isinstance(r, events.UpdateRejected)]
        lost = {(r.client, r.dispatch) for r in rejected if "buffer is lost" in r.reason}
        taken = not is_repeated and key in {*waiting, *applied, *lost}
        if taken:
            self.taken.append(message)
            self.accepted.append((name, message.sequence, to_seconds(message.sent)))
        return taken

    def hand_in(self, message: UpdateMessage) -> act.Actions:
        """Return the aggregator's actions for `message`, whose vector is overwritten afterwards: nobody
        may keep it."""
        copy = dataclasses.replace(message, vector=message.vector.copy())
        done = self.core.update(message.client, copy, 4, self.now)
        copy.vector[:] = np.nan
        self.execute(done)
        return done

    def say(self, name: str, state: str) -> None:
        self.execute(self.core.status(name, state, self.now))

    def end_instant(self, seconds: float = 1.0) -> None:
        """Fire due timers, send deferred replies, and advance the clock."""
        self.execute(self.core.due(self.now))
        self.execute(self.core.end_of_instant(self.now))
        self.now += seconds

    def work(self, rounds: int) -> None:
        """Let every present client process its messages, train and send, `rounds` times."""
        for _ in range(rounds):
            for name in self.alive:
                self.work_off(name)
            self.end_instant()

    def work_off(self, name: str) -> None:
        """All messages get to this client, it trains, and its updates arrive."""
        device = self.devices[name]
        while device.inbox:
            self.deliver(name)
        if device.training:
            self.finish(name)
        while device.outbox:
            self.arrive(name)

    # What the cores want

    def execute(self, actions: act.Actions) -> None:
        self.log += actions
        for action in actions:
            match action:
                case act.Dispatch(name, version, number):
                    self._send(name, version, number, **action.to_client)
                case act.BroadcastModel(version, number):
                    for name in self.devices:
                        self._send(name, version, number)
                case RequestUpdate(name, what):
                    self._put(name, what)
                case ReportRequest(name) | UnmaskRequest(name):
                    self._put(name, action)
                case act.Log(events.VersionMade()):
                    self.models.append(self.server.w.tobytes())

    def _send(self, name: str, version: int, number: int, **more: Any) -> None:
        w = self.dispatched[number] = self.server.w.copy()
        message = ModelMessage(run="run", version=version, dispatch=number, schema="s", vector=w, **more)
        self._put(name, message)

    def _put(self, name: str, message: Message) -> None:
        if self.devices[name].core is not None:
            self.devices[name].inbox.append(message)

    def _obey(self, device: Device, actions: client_core.Actions) -> None:
        for action in actions:
            match action:
                case client_core.Train(model):
                    device.training = model
                    if device.party is not None:
                        for recipient, share in device.party.prepare(model.dispatch):
                            self._put(recipient, Share(device.party.name, share))
                case client_core.Think(_):
                    assert device.core is not None
                    self._obey(device, device.core.on_thought(self._ns))
                case client_core.CutShort():
                    device.cut = True
                case client_core.Remember(memory):
                    device.memory = memory
                case client_core.SendUpdate(_, message):
                    device.outbox.append(message())


def _rng(name: str, update: int) -> np.random.Generator:
    """Return the random generator that rounds this update of the client."""
    return np.random.default_rng((ord(name[0]), update))

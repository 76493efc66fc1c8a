"""Malformed messages to the real decoding of aggregator, controller, router, and a client's peers.

Each is a right message with a few things made wrong, on a topic that a device may write to (or, for the
router, that the controller does). A client is sent keys, shares of masks, and chunks of them. Each is
taken, or refused for a reason; the model stays finite, and what a client keeps within its bounds.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents import shards
from agents.aggregator.intake import Intake
from agents.aggregator.main import Aggregator
from agents.config import (
    AggregatorConfig,
    BrokerAccess,
    Named,
    RouterConfig,
    RunSettings,
    StopConditions,
)
from agents.device_actions import Crash, SetLink
from agents.models.vectors import Buffers
from agents.mqtt import chunks
from agents.mqtt.rate_limit import RateLimit
from agents.mqtt.topics import AGGREGATOR, ROUTER, Topics
from agents.mqtt.transport import ReceivedMessage
from agents.pipeline.compression import METHODS
from agents.pipeline.interface import PeerError
from agents.router.main import Router
from agents.secure import secure_messages as secure_wire
from agents.secure.arithmetic import SecureRun
from agents.secure.party import Party
from agents.secure.secure_messages import Masked
from agents.tasks.quadratic import Quadratic
from agents.timing.nanoseconds import SECOND
from agents.wire import messages, payloads
from testbed.run.core import ControllerCore
from testbed.run.inputs import Connected, MessageArrived, WriteSample
from tests.fuzz.harness import Read
from tests.fuzz.mutations import VALUES, damage
from tests.testbed.test_process_runtime import spec

BODIES = ("vector", "encoded", "buffers", "vectors")
OWN_NAMES = ["control", "", "/", "control/w", "\x1b[2J", "x" * 5000]
BUFFERS = [([], [1]), ([1.0], [0]), ([np.nan], [-(2**63)]), ([1.0] * 99, [])]
WORDS = [[0], [2**31 - 1], [2**32 - 1], [1, 2]]
COUNTS = [0, 1, -1, 2**31, -(10**30), 10**400]
_SECURE = SecureRun(
    clients=["a", "b", "c"],
    updates=2,
    weights=1,
    colluding=1,
    needed=3,
    range=1.0,
    bits=16,
    timeout=60.0,
)
_SHARE = 2
"""Words of a share of a model of four parameters."""
VECTORS = [[np.nan], [np.inf], [3e38], [-1.9e19], [1.8e19], [1.0, 2.0], []]


class Parts:
    """The four parts, without a network."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._random = draw
        self.reasons: list[str] = []
        """Why messages were refused."""
        run = spec(folder)
        self._names = Topics(run.directory.run)
        self._written: list[str] = []
        self._controller = ControllerCore(run)
        self._controller.handle(Connected(0.0))
        self._aggregator = _aggregator(folder, self._names.run)
        self._router = _router(self._names.run)
        self._victim, self._peer = (Party("r", name, _SECURE, 4) for name in ("a", "b"))
        self._peer.add_peer("a", self._victim.public)
        self._joiner = chunks.Joiner(lambda _: secure_wire.share_size(_SHARE))
        for topic, message in (
            (self._names.status("d-1"), messages.Status("d-1", "ready")),
            (self._names.control(AGGREGATOR), messages.StartOrder()),
        ):
            self._aggregator._receive(ReceivedMessage(topic, messages.encode(message), 0))
        self._sequence = 0

    def send(self, part: str) -> None:
        """Send one message to a part."""
        aggregator = [self._update, self._update, self._status, self._sum]
        controller = [self._telemetry, self._failure, self._status_to_controller]
        peer = [self._key_or_share, self._key_or_share, self._chunk]
        senders = {"aggregator": aggregator, "controller": controller, "peer": peer}
        self._random.choice(senders.get(part, [self._order]))()
        self._aggregator._core.validate()
        assert np.isfinite(self._aggregator._server.w).all()
        assert sum(map(len, self._victim._held.values())) <= _SECURE.most_shares
        assert len(self._victim._channels._ciphers) <= 2
        kept = self._joiner._unfinished.values()
        assert sum(len(one.payload) for one in kept) <= secure_wire.share_size(_SHARE)

    def check_files(self) -> None:
        """Written lines are complete, printable, and name the device that sent them."""
        self._aggregator._durable.sync()
        for line in (self._aggregator._durable._directory / "events.jsonl").read_text().splitlines():
            assert str(json.loads(line).get("reason", "")).isprintable()
        assert all(json.loads(line)["device"] == "d-1" for line in self._written)
        self._aggregator._durable.close()

    def _update(self) -> None:
        self._sequence += 1
        aggregator, epoch = self._aggregator, self._aggregator._epoch or 0
        number, dispatch = max(
            aggregator._core._dispatches._open.get("d-1", {}).items(), default=(0, None)
        )
        begun = epoch + dispatch.at if dispatch else aggregator._clock.now()
        message = payloads.UpdateMessage(
            run=self._names.run,
            client="d-1",
            sequence=self._sequence,
            dispatch=number,
            base_version=0 if dispatch is None else dispatch.version,
            schema=aggregator._schema,
            kind="model",
            samples=1,
            steps=1,
            effective_steps=1.0,
            loss=0.5,
            downloaded=begun,
            train_start=begun,
            train_end=begun,
            sent=begun,
            vector=np.zeros(1, np.float32),
        )
        if self._random.random() < 0.3:
            vector = np.array(self._random.choice(VECTORS), np.float32)
            message = replace(message, vector=vector)
        if message.vector.size and self._random.random() < 0.3:
            small = METHODS[self._random.choice([*METHODS])]().compress(message.vector).encoded
            message = replace(message, vector=message.vector[:0], encoded=small)
        if self._random.random() < 0.2:
            floats, integers = self._random.choice(BUFFERS)
            found = Buffers(np.array(floats, np.float32), np.array(integers, np.int64))
            message = replace(message, buffers=found)
        if self._random.random() < 0.2:
            words = np.array(self._random.choice(WORDS), np.uint32)
            holders = self._random.choice([(0,), (), (1,), (0, 9_000)])
            masked = Masked(words, holders, self._random.choice(COUNTS), self._random.choice(COUNTS))
            message = replace(message, vector=message.vector[:0], encoded=masked.encoded)
        if self._random.random() < 0.1:
            names = self._random.choices(OWN_NAMES, k=2)
            own = np.array(self._random.choice(VECTORS), np.float32)
            message = replace(message, vectors={names[0]: own, names[1]: message.encoded or own})
        if self._random.random() < 0.5:
            field = self._random.choice([name for name in message.__slots__ if name not in BODIES])
            message = replace(message, **{field: self._random.choice(VALUES)})
        payload = _unlimited(lambda: payloads.encode(message))
        at = aggregator._clock.now()
        aggregator._receive(ReceivedMessage(self._names.update("d-1"), self._damaged(payload), at))

    def _status(self) -> None:
        payload = self._damaged(self._random.choice([b"ready", b"joining", b"offline"]))
        ready = ReceivedMessage(self._names.status("d-1"), b"ready", 0)
        self._aggregator._receive(ReceivedMessage(self._names.status("d-1"), payload, 0))
        self._aggregator._receive(ready)  # else most updates would be refused for that alone

    def _sum(self) -> None:
        words = np.array(self._random.choice(WORDS), np.uint32)
        payload = secure_wire.encode_sum(self._random.choice([0, 1, 2**63]), words)
        received = ReceivedMessage(self._names.sums("d-1"), self._damaged(payload), 0)
        self._aggregator._receive(received)

    def _key_or_share(self) -> None:
        try:
            if self._random.random() < 0.2:
                key = self._random.choice([self._peer.public, bytes(32), bytes(31)])
                self._victim.add_peer(self._random.choice(["a", "b", "c", "d"]), self._damaged(key))
                return
            self._victim.add_peer("b", self._peer.public)
            ((_, share),) = self._peer.prepare(self._random.choice([0, 1, 2, 2**64 - 1]))
            sender = self._random.choice(["b", "b", "b", "c"])
            self._victim.receive_share(sender, bytearray(self._damaged(share)))
        except PeerError as error:
            self.reasons.append(str(error))

    def _chunk(self) -> None:
        number, big = self._random.choice([1, 2]), self._random.choice([0, 7, 2**31, 2**64 - 1])
        index, count = (
            self._random.choice([0, 1, 2**32 - 1]),
            self._random.choice([0, 2, 4096, 2**32 - 1]),
        )
        head = chunks.HEAD.pack(b"testbed\xff", number, index, count, big)
        self._joiner.add("testbed/r/share/a/b", self._damaged(head + bytes(self._random.choice([0, 9]))))

    def _status_to_controller(self) -> None:
        self._hear(self._names.status("d-1"), b"ready")

    def _telemetry(self) -> None:
        sample: Any = {"device": "d-1", "at": 1.0, "cpu": 1.0, "memory": 1}
        probe: Any = {"device": "d-1", "at": 1.0, "probe": {"up": 1e6}}
        limits: Any = {"device": "d-1", "at": 1.0, "limits": {"quota": 1, "period": 1}}
        fields = self._random.choice([sample, probe, limits])
        if self._random.random() < 0.6:
            fields[self._random.choice([*fields, "periods", "probe", "limits", "x"])] = (
                self._random.choice(VALUES)
            )
        payload = _unlimited(lambda: json.dumps(fields).encode())
        self._hear(self._names.telemetry("d-1"), payload)

    def _failure(self) -> None:
        text = str(self._random.choice(["`tc` failed", "\x1b[2J\nno\r", "x" * 5000, "\u202e"]))
        self._hear(self._names.failure("d-1"), text.encode())

    def _hear(self, topic: str, payload: bytes) -> None:
        arrived = MessageArrived(time.monotonic(), topic, self._damaged(payload))
        actions = self._controller.handle(arrived)
        self._controller.validate()
        self._written += [action.line for action in actions if isinstance(action, WriteSample)]
        self._controller.run.orders.clear()
        self._controller.run.failures.clear()

    def _order(self) -> None:
        action = Crash() if self._random.random() < 0.5 else SetLink({"rtt": 0.1})
        payload = messages.encode(messages.DeviceOrder("d-1", action))
        self._router._carry_out(ReceivedMessage(self._names.control(ROUTER), self._damaged(payload), 0))

    def _damaged(self, payload: bytes) -> bytes:
        return payload if self._random.random() < 0.5 else damage(payload, self._random)


def _unlimited(encode: Callable[[], bytes]) -> bytes:
    """Encode as a peer in any language may: Python itself writes no integer of 5000 digits."""
    digits = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return encode()
    finally:
        sys.set_int_max_str_digits(digits)


class _Silent:
    """Stand-ins for a connection and for the kernel's delay line."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def open(self, _timeout: float = 0.0) -> None: ...
    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None: ...
    def change(self, queue: int, impairment: object) -> None: ...

    publish_status = publish


def _aggregator(folder: Path, run: str) -> Aggregator:
    (folder / "models").mkdir()
    shards.save(Quadratic(((1.0,),)).shards()[0], folder / "shard")
    return Aggregator(
        AggregatorConfig(
            settings=RunSettings(
                run=run,
                importance={"d-1": 1.0},
                evaluate_every=10**6 * SECOND,
                stop=StopConditions(after=1e6),
                patient=True,
                keeps_models=True,
            ),
            broker=BrokerAccess("localhost", 1883, "a", ""),
            task=Named("quadratic", {"centers": [[1.0]]}),
            rule=Named("fedasync", {}),
            seed=1,
            test_set=str(folder / "shard"),
            run_directory=str(folder),
            threads=1,
        )
    )


def _router(run: str) -> Router:
    return Router(
        RouterConfig(
            run=run,
            broker=BrokerAccess("localhost", 1883, "a", ""),
            targets={"broker": 1883},
            addresses={"d-1": "10.0.0.2"},
            links={"d-1": {"rtt": 0.2}},
            segments=[],
            attached={},
            seed=1,
        )
    )


PARTS = ("aggregator", "controller", "router", "peer")
_MESSAGES = 10
"""Maximum number of messages to a part, before a new one is made."""


def to(part: str) -> Callable[[Path], Any]:
    """Return the door of a part."""

    @contextmanager
    def open_part(folder: Path) -> Iterator[Read]:
        numbers = itertools.count()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("agents.aggregator.main.Connection", _Silent)
            patch.setattr("agents.router.main.Connection", _Silent)
            patch.setattr("agents.router.main.DelayServer", _Silent)
            patch.setattr("agents.router.main.iptables", lambda: ["iptables"])
            patch.setattr("agents.router.main.run", lambda _: "")
            patch.setattr(RateLimit, "admits", lambda *_: True)
            add, reject = messages.Refusals.add, Intake.reject
            parts: Parts

            def added(refusals: messages.Refusals, topic: str, error: messages.MessageError) -> int:
                parts.reasons.append(str(error))
                refusals.log = lambda _: None
                return add(refusals, topic, error)

            def rejected(intake: Intake, *what: Any) -> Any:
                actions = reject(intake, *what)
                parts.reasons += [one.record.reason for one in actions]  # type: ignore[union-attr]
                return actions

            patch.setattr(messages.Refusals, "add", added)
            patch.setattr(Intake, "reject", rejected)

            def read(draw: random.Random) -> object:
                nonlocal parts
                place = folder / str(next(numbers))
                place.mkdir()
                parts = Parts(place, draw)
                for _ in range(draw.randrange(1, _MESSAGES)):
                    parts.reasons.clear()
                    parts.send(part)
                    assert all(len(one) <= 300 and one.isprintable() for one in parts.reasons)
                parts.check_files()
                shutil.rmtree(place)
                if parts.reasons:
                    raise messages.MessageError(parts.reasons[-1])
                return None

            yield read

    return open_part

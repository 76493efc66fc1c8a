"""Speed of the aggregator without network: payload → decode → check → rule → records → dispatch.

    python -m benchmarks.aggregator

Updates per second for each model size and rule, and times relative to a bare copy of the payload and to
a naive server (below 1 is faster). The naive server decodes with the safetensors library, computes w +
s·Δ out of place, and encodes with the library. `recorded` writes all inputs to a file (`durability:
recording`), at the speed of the page cache: the disk comes later.

    python -m benchmarks.aggregator durability [FOLDER]

The cost of `durability: update`: updates per second with every input on FOLDER's disk (default: this
folder) before its sender gets an answer, checkpoints included, relative to `durability: none`, which
writes nothing. Each client sends its next update when it has the answer to its last one; this takes it
no time. With eight clients, those that arrive while the disk is busy share the next write; one client
waits for the disk each time. Rounds of both alternate. `disk` is what the disk can do: the same bytes
written over a file, around the page cache, eight updates or one per fdatasync. Compare the ratios;
absolute figures are this machine's.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
import safetensors.numpy

from agents import events, process
from agents.aggregator import actions as act
from agents.aggregator import inputs
from agents.aggregator.core import AggregatorCore, Setup
from agents.aggregator.durable import DurableCore
from agents.aggregator.inputs import Settings
from agents.aggregator.messages import PendingMessages
from agents.aggregator.recording import Recording
from agents.aggregator.storage import BLOCK, AppendedFile
from agents.config import Durability, Named, StopConditions
from agents.models.vectors import Vector
from agents.mqtt.topics import Topics
from agents.pipeline.steps import ServerSteps
from agents.rules.fedasync import FedAsync
from agents.rules.fedavg import FedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Rule, Server
from agents.timing.nanoseconds import SECOND
from agents.wire import payloads
from agents.wire.payloads import UpdateMessage

CLIENTS = [f"client-{i}" for i in range(8)]
SIZES = {"10k": 10_000, "550k": 550_000, "1M": 1_000_000, "5M": 5_000_000}
RULES: dict[str, Rule] = {
    "fedavg": FedAvg(),
    "fedasync": FedAsync(),
    "fedbuff": FedBuff(buffer_size=4),
    "fedbuff, discounted": FedBuff(buffer_size=4, staleness="inverse_sqrt"),
}
_NOW = 3 * SECOND
"""Reading of the run clock, which stands still: work and messages take no time on it."""
_SECONDS = 1.0
"""Seconds spent on each row."""
_DURABILITY_SIZES = {"10k": 10_000, "550k": 550_000, "11M": 11_000_000}
_ROUNDS = 12
_ROUND = 32
"""Number of updates per round, for each durability."""
_HEAD = 1024
"""Bytes of a payload before the vector."""


class Aggregator:
    """The core and the wire format, used as the aggregator process uses them; the network is a dict."""

    def __init__(self, rule: Rule, size: int, record: Path | None = None) -> None:
        importance = dict.fromkeys(CLIENTS, 1 / len(CLIENTS))
        settings = Settings(
            run="bench",
            schema="schema",
            side=rule.client_side,
            importance=importance,
            stop=StopConditions(after=1e9),
            evaluate_every=SECOND * 1_000_000_000,
        )
        self._kind = rule.client_side.kind
        self._vector = np.random.default_rng(0).normal(0, 1e-6, size).astype(np.float32)
        self._rule = rule
        self._begin(settings)
        self._recording: Recording | None = None
        if record is not None:
            self._recording = Recording(record, Setup(settings, Named("fedbuff", {}), 0))
        self._outbox = PendingMessages(Topics("bench"), CLIENTS, "schema", self._server)
        self._dispatches: dict[str, act.Dispatch] = {}
        self._sequence = 0
        for client in CLIENTS:
            self._handle(inputs.StatusChanged(0, client, "ready"))
        self._handle(inputs.Started(0, 0.0, 0))
        self._handle(inputs.InstantOver(0))

    def _begin(self, settings: Settings) -> None:
        self._server = Server(self._vector.copy(), {}, np.random.default_rng(0))
        state, steps = self._rule.begin(self._server), ServerSteps((), self._vector.size)
        self._core = AggregatorCore(settings, state, self._server, steps)

    def payloads(self) -> list[tuple[str, bytes]]:
        """Make an update of every client, in answer to the model that it was sent last."""
        self._sequence += 1
        return [(client, self._payload(client)) for client in CLIENTS]

    def _payload(self, client: str) -> bytes:
        return payloads.encode(self._update(client))

    def _update(self, client: str) -> UpdateMessage:
        dispatch = self._dispatches[client]
        return UpdateMessage(
            run="bench",
            client=client,
            sequence=self._sequence,
            dispatch=dispatch.number,
            base_version=dispatch.version,
            schema="schema",
            kind=self._kind,
            samples=100,
            effective_steps=1.0,
            steps=20,
            loss=0.5,
            downloaded=_NOW,
            train_start=_NOW,
            train_end=_NOW,
            sent=_NOW,
            vector=self._vector,
        )

    def handle(self, updates: list[tuple[str, bytes]]) -> None:
        """Handle updates: this is what is measured."""
        for client, payload in updates:
            message = payloads.decode_update(payload)
            self._handle(inputs.UpdateArrived(_NOW, client, len(payload), _NOW, message), payload)
            if self._recording is not None:
                self._recording.flush()
            self._outbox.waiting.clear()

    def _actions(self, event: inputs.Input, payload: bytes | bytearray | None) -> act.Actions:
        if self._recording is not None:
            self._recording.write(event, payload)
        return self._core.handle(event)

    def _handle(self, event: inputs.Input, payload: bytes | bytearray | None = None) -> None:
        for action in self._actions(event, payload):
            match action:
                case act.Dispatch(client):
                    self._dispatches[client] = action
                    self._outbox.add_model(action)
                case act.Log(record):
                    events.to_line(record)
                case act.EndInstant():
                    self._handle(inputs.InstantOver(event.at))


def naive(w: Vector, payloads: list[tuple[str, bytes]]) -> Vector:
    """Handle updates in a server that was written without regard to copies."""
    for _, payload in payloads:
        delta = safetensors.numpy.load(payload)["w"]
        if not np.isfinite(delta).all():
            raise ValueError("not finite")
        w = w + 0.25 * delta
        safetensors.numpy.save({"w": w}, {"version": "1"})
    return w


def per_update(round_of_updates: Callable[[], float]) -> float:
    """Seconds per update in the fastest of many rounds: other work on the host only adds time."""
    round_of_updates()  # warms up caches and memory
    times: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(times) < 3 or time.perf_counter() < until:
        times.append(round_of_updates())
    return min(times) / len(CLIENTS)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(size: int) -> tuple[float, float, dict[str, float]]:
    """Seconds per update of a bare copy, of the naive server, and of each rule."""
    aggregator = Aggregator(RULES["fedbuff"], size)
    payloads = aggregator.payloads()
    target = np.empty(len(payloads[0][1]), np.uint8)
    sources = [np.frombuffer(payload, np.uint8) for _, payload in payloads]

    def copies() -> None:
        for source in sources:
            np.copyto(target, source)

    copy = per_update(lambda: timed(copies))
    w = np.zeros(size, np.float32)
    reference = per_update(lambda: timed(lambda: naive(w, payloads)))
    rules = {}
    for name, rule in RULES.items():
        aggregator = Aggregator(rule, size)
        rules[name] = per_update(lambda a=aggregator: _round(a))  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "inputs.bin"
        aggregator = Aggregator(RULES["fedbuff"], size, file)
        rules["fedbuff, recorded"] = per_update(lambda: _round(aggregator, file))
    return copy, reference, rules


def _round(aggregator: Aggregator, file: Path | None = None) -> float:
    if file is not None:
        os.truncate(file, 0)  # otherwise it would grow to gigabytes
    payloads = aggregator.payloads()
    return timed(lambda: aggregator.handle(payloads))


class Durable(Aggregator):
    """The same with a durable core, on the disk of `folder`."""

    def __init__(self, size: int, folder: Path, durability: Durability) -> None:
        self._folder, self._durability = folder, durability
        super().__init__(RULES["fedbuff"], size)
        self._writing: Future[None] | None = None
        self._handled: list[str] = []
        """Clients whose update is handled, but not being written."""
        self._written: list[str] = []
        """Clients whose update is being written."""
        self._payloads = {client: bytearray(_HEAD + 4 * size) for client in CLIENTS}
        for payload in self._payloads.values():
            payload[_HEAD:] = self._vector.tobytes()

    def _begin(self, settings: Settings) -> None:
        setup = Setup(settings, Named("fedbuff", {"buffer_size": 4}), 0)
        (self._folder / "models").mkdir(parents=True)
        durability, w = self._durability, self._vector.copy()
        self._durable = DurableCore(self._folder, setup, w, leg="1", durability=durability)
        self._server = self._durable.server

    def _actions(self, event: inputs.Input, payload: bytes | bytearray | None) -> act.Actions:
        return self._durable.handle(event, payload)

    def close(self) -> None:
        self._durable.close()

    def serve(self, clients: Sequence[str], updates: int) -> float:
        """Handle `updates` updates of `clients`, as the aggregator's process does; return the seconds
        until all are answered."""
        begin, left, waiting = time.perf_counter(), updates, deque(clients)
        while left or self._handled or self._written:
            if left and waiting:
                left -= 1
                client = waiting.popleft()
                self._arrive(client)
                self._handled.append(client)
            elif self._writing is not None:
                wait([self._writing])
            waiting += self._commit()
        return time.perf_counter() - begin

    def _commit(self) -> list[str]:
        """Do as `Aggregator._commit` of the process; return the clients that are answered."""
        answered: list[str] = []
        if self._writing is not None:
            if not self._writing.done():
                return []
            self._durable.finish_sync()
            answered, self._written = self._written, []
        self._outbox.take()
        self._writing, handled, self._handled = self._durable.start_sync(), self._handled, []
        if self._writing is None:
            return answered + handled
        self._written = handled
        return answered

    def _arrive(self, client: str) -> None:
        self._sequence += 1
        payload = self._payloads[client]
        head = payloads.lay_out(self._update(client))[0][8:].ljust(_HEAD - 8)
        payload[:_HEAD] = struct.pack("<Q", len(head)) + head
        message = payloads.decode_update(payload)
        self._handle(inputs.UpdateArrived(_NOW, client, len(payload), _NOW, message), payload)


def durability(folder: Path) -> None:
    print(f"{'parameters':>10}  {'':<20}{'updates/s':>10}{'ms/update':>11}{'÷ none':>8}")
    kinds: tuple[Durability, ...] = ("none", "update")
    for label, size in _DURABILITY_SIZES.items():
        with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-") as place:
            made = {kind: Durable(size, Path(place) / kind, kind) for kind in kinds}
            for clients in (CLIENTS, CLIENTS[:1]):
                times: dict[str, float] = dict.fromkeys((*kinds, "disk"), 0.0)
                for _ in range(_ROUNDS):
                    for kind, aggregator in made.items():
                        times[kind] += aggregator.serve(clients, _ROUND)
                    bare = Path(place) / "bare"
                    times["disk"] += write_bare(bare, _ROUND, 4 * size, len(clients))
                for what, seconds in times.items():
                    each, name = seconds / _ROUNDS / _ROUND, f"{what}, {len(clients)} at once"
                    ratio = times["none"] / seconds
                    print(f"{label:>10}  {name:<20}{1 / each:>10.0f}{1e3 * each:>11.3f}{ratio:>8.2f}")
            for aggregator in made.values():
                aggregator.close()


def write_bare(path: Path, count: int, size: int, group: int) -> float:
    """Write `count` times `size` bytes to the file at `path`, of which `group` share an fdatasync;
    return the seconds."""
    block = bytes(-(-size // BLOCK) * BLOCK)
    file = AppendedFile(path, direct=True)
    begin = time.perf_counter()
    for _ in range(count // group):
        file.write([block] * group)
        file.sync()
    seconds = time.perf_counter() - begin
    file.close()
    return seconds


def main() -> None:
    process.keep_freed_memory()  # as the aggregator's process does
    if sys.argv[1:2] == ["durability"]:
        durability(Path(sys.argv[2] if len(sys.argv) > 2 else "."))
        return
    print(f"{'parameters':>10}  {'':<20}{'updates/s':>10}{'ms/update':>11}{'÷ copy':>8}{'÷ naive':>9}")
    for label, size in SIZES.items():
        copy, reference, rules = measure(size)
        for name, seconds in {"copy": copy, "naive": reference, **rules}.items():
            print(
                f"{label:>10}  {name:<20}{1 / seconds:>10.0f}{1e3 * seconds:>11.3f}"
                f"{seconds / copy:>8.1f}{seconds / reference:>9.2f}"
            )


if __name__ == "__main__":
    main()

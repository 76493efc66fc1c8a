"""Check that memory stays flat and no update is lost while clients send as fast as they can.

    python -m benchmarks.load [--seconds 120] [--clients 100] [--parameters 10000] [--flooding 1]

Mosquitto and the aggregator's own process over loopback, with `durability: update`; clients without
learning, up to a hundred per process, answer each model at once. Flooding clients begin at half the
time: they send messages of an update's size that are not updates, as fast as the broker accepts them,
and ignore all answers; they are ended when the aggregator shuts them out. Every tenth of the time it
prints acknowledged updates per second, the cores that each part uses, and its memory, with shared pages
counted in part. At the end, each update that the aggregator has acknowledged must be in its records
exactly once, applied or rejected; otherwise the exit code is 1. The busiest process, if it uses a whole
core, is the bottleneck.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agents import config, events, shards
from agents.config import AggregatorConfig, BrokerAccess, Named, RunSettings, StopConditions
from agents.mqtt.topics import AGGREGATOR, CONTROLLER, Topics
from agents.mqtt.transport import Connection, ReceivedMessage
from agents.tasks.quadratic import Quadratic
from agents.timing.nanoseconds import SECOND
from agents.wire import messages, payloads
from testbed.broker import BrokerLimits, Listeners, accounts, find_mosquitto, write_mosquitto
from testbed.rundir.live_files import RecordFollower
from testbed.runtimes.process.runtime import HOST, free_ports

_RUN, _TOPICS = "load", Topics("load")
_CONNECTIONS = 100
"""Maximum number of clients per process."""


class Client:
    """Client that only exchanges messages. `acknowledged` counts over all clients."""

    def __init__(self, login: BrokerAccess, acknowledged: Any) -> None:
        self.login = login
        self.sent = 0
        self.had: list[int] = []
        """Dispatches whose updates were acknowledged."""
        self._acknowledged = acknowledged
        self._open: dict[int, bytes] = {}
        """Dispatch -> update that is not acknowledged yet."""
        topics = [_TOPICS.model(login.username), _TOPICS.request(login.username)]
        self._connection = Connection(login, topics, self._receive, largest={"model": 2**32})

    def start(self) -> None:
        name = self.login.username
        self._connection.open()
        ready = messages.encode(messages.Status(name, "ready"))
        self._connection.publish_status(_TOPICS.status(name), ready)

    def close(self) -> None:
        self._connection.close()

    def _receive(self, message: ReceivedMessage) -> None:
        name = self.login.username
        if message.topic == _TOPICS.model(name):
            self._answer(payloads.decode_model(message.payload), message.at)
            return
        match messages.decode(_TOPICS, message.topic, message.payload):
            case messages.Acknowledgement(_, dispatch):
                if self._open.pop(dispatch, None) is not None:
                    self.had.append(dispatch)
                    with self._acknowledged.get_lock():
                        self._acknowledged.value += 1
            case messages.Request(_, "report"):
                for payload in self._open.values():
                    self._connection.publish(_TOPICS.update(name), payload)
                report = messages.Report(name, max(self._open, default=0))
                self._connection.publish(_TOPICS.report(name), messages.encode(report))

    def _answer(self, model: payloads.ModelMessage, at: int) -> None:
        self.sent += 1
        now = time.monotonic_ns()
        payload = payloads.encode(
            payloads.UpdateMessage(
                run=_RUN,
                client=self.login.username,
                sequence=self.sent,
                dispatch=model.dispatch,
                base_version=model.version,
                schema=model.schema,
                kind="delta",
                samples=1,
                steps=1,
                effective_steps=1.0,
                loss=0.5,
                downloaded=at,
                train_start=at,
                train_end=now,
                sent=now,
                vector=np.zeros_like(model.vector),
            )
        )
        self._open[model.dispatch] = payload
        self._connection.publish(_TOPICS.update(self.login.username), payload)


def push(logins: list[BrokerAccess], acknowledged: Any, told: Any) -> None:
    """Run a process of clients until a message on `told`; send back through it what they have seen."""
    clients = [Client(login, acknowledged) for login in logins]
    for client in clients:
        client.start()
    told.recv()
    told.send([(client.login.username, client.sent, client.had) for client in clients])
    for client in clients:
        client.close()


def flood(login: BrokerAccess, size: int) -> None:
    """Run a process that floods with messages of `size` bytes on its own topic."""
    connection = Connection(login, [], lambda _: None, keepalive=3600)  # a ping would split a packet
    connection.open()
    sock: Any = connection._paho.socket()
    topic = _TOPICS.update(login.username).encode()
    rest = len(topic).to_bytes(2, "big") + topic + bytes(size)
    length, head = len(rest), bytearray([0x30])  # PUBLISH with QoS 0
    while length:
        length, digit = divmod(length, 128)
        head.append(digit | (0x80 if length else 0))
    packet = bytes(head) + rest
    sock.settimeout(None)
    with suppress(OSError):  # the broker closes the connection
        while True:
            sock.sendall(packet)


@contextmanager
def _child(command: list[str], log: Path) -> Iterator[psutil.Popen]:
    with log.open("wb") as file:
        child = psutil.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield child
        finally:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
            child.wait()


@dataclass(slots=True)
class Meter:
    """Meter of the processes of one part: CPU time since the last look, and memory."""

    processes: list[psutil.Process]
    _used: float = 0.0
    _at: float = field(default_factory=time.monotonic)

    def look(self) -> tuple[float, float]:
        """Return cores in use, and MB."""
        used = memory = 0.0
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used += times.user + times.system
                memory += process.memory_full_info().pss / 1e6
        now = time.monotonic()
        cores = (used - self._used) / (now - self._at)
        self._used, self._at = used, now
        return cores, memory


def load(seconds: float, clients: int, parameters: int, flooding: int) -> bool:
    """Run the benchmark; return whether no update was lost."""
    names = [f"c-{number}" for number in range(clients)]
    floods = [f"flood-{number}" for number in range(flooding)]
    made = accounts(_RUN, names + floods)
    (port,) = free_ports(1)
    spawn = multiprocessing.get_context("spawn")
    acknowledged: Synchronized[int] = spawn.Value("q", 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        limits = BrokerLimits.for_run(parameters, len(names + floods))
        conf = write_mosquitto(folder / "broker", made, Listeners(HOST, port), limits=limits)
        task = Named("quadratic", {"centers": [[1.0] * parameters]})
        shards.save(Quadratic(((1.0,) * parameters,)).shards()[0], folder / "test")
        settings = AggregatorConfig(
            settings=RunSettings(
                run=_RUN,
                importance=dict.fromkeys(names + floods, 1 / len(names + floods)),
                evaluate_every=10**6 * SECOND,
                stop=StopConditions(after=seconds),
            ),
            broker=made[AGGREGATOR].at(HOST, port),
            task=task,
            rule=Named("fedbuff", {"buffer_size": 10}),
            seed=1,
            test_set=str(folder / "test"),
            run_directory=str(folder),
            threads=1,
        )
        config.dump(settings, folder / "aggregator.json")
        aggregator_command = [sys.executable, "-m", "agents.aggregator.main"]
        with (
            _child([find_mosquitto() or "mosquitto", "-c", str(conf)], folder / "log") as broker,
            _child([*aggregator_command, str(folder / "aggregator.json")], folder / "said") as server,
        ):
            ready: list[str] = []
            controller = Connection(
                made[CONTROLLER].at(HOST, port),
                [_TOPICS.status("+")],
                lambda message: ready.append(message.topic),
            )
            controller.open()
            pipes, fleet = [], []
            for first in range(0, clients, _CONNECTIONS):
                ours, theirs = spawn.Pipe()
                logins = [made[each].at(HOST, port) for each in names[first : first + _CONNECTIONS]]
                fleet.append(
                    spawn.Process(target=push, args=(logins, acknowledged, theirs), daemon=True)
                )
                pipes.append(ours)
            flooders = {
                one: spawn.Process(
                    target=flood, args=(made[one].at(HOST, port), 4 * parameters), daemon=True
                )
                for one in floods
            }
            for each in fleet:
                each.start()
            until = time.monotonic() + 60
            while len(set(ready)) <= clients:
                time.sleep(0.1)
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"{len(set(ready))} of {clients} clients and the aggregator are ready"
                    )
            start = messages.encode(messages.StartOrder())
            controller.publish(_TOPICS.control(AGGREGATOR), start)
            meters = {
                "broker": Meter([broker]),
                "aggregator": Meter([server]),
                "clients": Meter([psutil.Process(each.pid) for each in fleet]),
            }
            _watch(seconds, acknowledged, meters, server, flooders, folder / "events.jsonl")
            server.wait(60)
            for pipe in pipes:
                pipe.send(None)
            found = [one for pipe in pipes for one in pipe.recv()]
            for each in flooders.values():
                each.terminate()
            for each in (*fleet, *flooders.values()):
                each.join()
            controller.close()
        print((folder / "said").read_text(), end="")
        return _accounts(folder / "events.jsonl", found, floods)


def _watch(
    seconds: float,
    acknowledged: Any,
    meters: dict[str, Meter],
    server: psutil.Popen,
    flooders: Mapping[str, SpawnProcess],
    records: Path,
) -> None:
    """Print a line per interval; end flooding clients when they are shut out, as a controller does."""
    print(f"{'s':>5}{'updates/s':>11}", *(f"{name:>10}: cores, MB" for name in meters))
    begin, before = time.monotonic(), 0
    follower = RecordFollower(records)
    for meter in meters.values():
        meter.look()
    for tenth in range(1, 11):
        until = begin + tenth * seconds / 10
        if tenth == 6:
            for each in flooders.values():
                each.start()
        while (left := until - time.monotonic()) > 0 and server.poll() is None:
            time.sleep(min(left, 0.2))
            for record in follower.read():
                if isinstance(record, events.Acted):
                    flooders[record.device].kill()
                    since = time.monotonic() - begin - seconds / 2
                    print(f"{record.device} was shut out {since:.1f} s after it was started")
        now = acknowledged.value
        looks = [meter.look() for meter in meters.values()]
        shown = (f"{cores:>14.2f} {memory:>6.0f}" for cores, memory in looks)
        print(
            f"{time.monotonic() - begin:>5.0f}{(now - before) * 10 / seconds:>11.0f}", *shown, flush=True
        )
        before = now


def _accounts(records: Path, found: list[tuple[str, int, list[int]]], floods: list[str]) -> bool:
    """Compare what clients have seen with the aggregator's records; return whether they agree."""
    kinds: Counter[str] = Counter()
    dealt_with: Counter[str] = Counter()
    applied: set[tuple[str, int]] = set()
    twice = 0
    with records.open("rb") as file:
        for line in file:
            record = events.from_line(line.decode())
            if isinstance(record, events.UpdateApplied):
                twice += (record.client, record.sequence) in applied
                applied.add((record.client, record.sequence))
            if isinstance(record, events.UpdateApplied | events.UpdateRejected):
                kinds[f"{record.event}{' (of who floods)' * (record.client in floods)}"] += 1
                dealt_with[record.client] += 1
    sent = sum(each for _, each, _ in found)
    had = sum(len(each) for _, _, each in found)
    lost = sum(max(0, len(each) - dealt_with[name]) for name, _, each in found)
    print(f"sent {sent:,}, acknowledged {had:,}; {dict(kinds)}; lost {lost}, applied twice {twice}")
    return not lost and not twice


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=10_000)
    parser.add_argument("--flooding", type=int, default=0)
    given = parser.parse_args()
    sys.exit(not load(given.seconds, given.clients, given.parameters, given.flooding))


if __name__ == "__main__":
    main()

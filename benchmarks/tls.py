"""Cost of TLS between clients and broker: updates per second, and bytes per update.

    python -m benchmarks.tls

Mosquitto, and an aggregator and clients without learning: each client answers a model at once with an
update of that size, so this is the highest cost that TLS can have. The clients are in a process of their
own, with and without TLS in turns; compare the ratio, as the figures are this machine's. Bytes are TCP
payload in both directions, per round.
"""

from __future__ import annotations

import multiprocessing
import queue
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

from agents.config import BrokerAccess
from agents.mqtt.topics import Topics
from agents.mqtt.transport import Connection, ReceivedMessage
from testbed.broker import Listeners, accounts, find_mosquitto, write_mosquitto
from testbed.broker.access import new_identity
from testbed.runtimes.process.runtime import HOST, free_ports

CLIENTS = ("a", "b")
SIZES = {"10k": 10_000, "550k": 550_000, "11M": 11_000_000}
"""Label -> number of parameters."""
_TURNS, _SECONDS = 5, 1.5
TOPICS = Topics("bench")
ANY_SIZE = {"model": 2**32, "update": 2**32}


def answer(logins: dict[str, BrokerAccess]) -> None:
    """Run the clients' process: an update in answer to every model."""
    connections: dict[str, Connection] = {}

    def open_one(name: str, login: BrokerAccess) -> None:
        connections[name] = Connection(
            login,
            [TOPICS.model(name)],
            lambda model: connections[name].publish(TOPICS.update(name), model.payload),
            largest=ANY_SIZE,
        )
        connections[name].open()
        connections[name].publish(TOPICS.status(name), b"ready")

    for name, login in logins.items():
        open_one(name, login)
    threading.Event().wait()


def updates_per_second(aggregator: BrokerAccess, logins: dict[str, BrokerAccess], size: int) -> float:
    inbox: queue.SimpleQueue[ReceivedMessage] = queue.SimpleQueue()
    topics = [TOPICS.update("+"), TOPICS.status("+")]
    connection = Connection(aggregator, topics, inbox.put, largest=ANY_SIZE)
    connection.open()
    clients = multiprocessing.get_context("spawn").Process(target=answer, args=(logins,), daemon=True)
    clients.start()
    try:
        for _ in logins:
            inbox.get(timeout=20)  # it is ready
        model = bytes(4 * size)
        for name in logins:
            connection.publish(TOPICS.model(name), model)
        for _ in logins:  # warm-up
            connection.publish(TOPICS.model(TOPICS.split(inbox.get(timeout=60).topic)[1]), model)
        count, begin = 0, time.perf_counter()
        while count < 3 or time.perf_counter() < begin + _SECONDS:
            connection.publish(TOPICS.model(TOPICS.split(inbox.get(timeout=60).topic)[1]), model)
            count += 1
        return count / (time.perf_counter() - begin)
    finally:
        clients.terminate()
        clients.join()
        connection.close()


def bytes_per_round(aggregator: BrokerAccess, login: BrokerAccess, size: int) -> int:
    """Count the bytes of a model to one client and of its update, by a forwarder between client and
    broker."""
    counted = [0]

    def forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                counted[0] += len(data)
                target.sendall(data)

    def accept(listening: socket.socket) -> None:
        ends = listening.accept()[0], socket.create_connection((login.host, login.port))
        for pair in (ends, ends[::-1]):
            threading.Thread(target=forward, args=pair, daemon=True).start()

    with closing(socket.create_server((HOST, 0))) as listening:
        threading.Thread(target=accept, args=(listening,), daemon=True).start()
        through = BrokerAccess(
            HOST, listening.getsockname()[1], login.username, login.password, login.certificate
        )
        inbox: queue.SimpleQueue[ReceivedMessage] = queue.SimpleQueue()
        server = Connection(aggregator, [TOPICS.update("+")], inbox.put, largest=ANY_SIZE)
        client = Connection(
            through,
            [TOPICS.model("a")],
            lambda model: client.publish(TOPICS.update("a"), model.payload),
            largest=ANY_SIZE,
        )
        server.open()
        client.open()
        time.sleep(0.2)
        before = counted[0]
        server.publish(TOPICS.model("a"), bytes(4 * size))
        inbox.get(timeout=60)
        time.sleep(0.2)  # wait for the acknowledgements
        found = counted[0] - before
        client.close()
        server.close()
        return found


def main() -> None:
    made, identity = accounts("bench", CLIENTS), new_identity(HOST)
    port, tls_port = free_ports(2)
    with tempfile.TemporaryDirectory() as folder:
        at = Listeners(HOST, port, tls_port)
        conf = write_mosquitto(Path(folder), made, at, identity)
        mosquitto = find_mosquitto() or "mosquitto"
        with subprocess.Popen([mosquitto, "-c", str(conf)], stdout=subprocess.DEVNULL) as broker:
            try:
                time.sleep(0.5)
                aggregator = made["aggregator"].at(HOST, port)
                plain = {name: made[name].at(HOST, port) for name in CLIENTS}
                tls = {name: made[name].at(HOST, tls_port, identity.certificate) for name in CLIENTS}
                print(f"{'parameters':>10}{'updates/s':>11}{'with TLS':>10}{'ratio':>7}{'bytes':>9}")
                for label, size in SIZES.items():
                    turns = [
                        [updates_per_second(aggregator, each, size) for each in (plain, tls)]
                        for _ in range(_TURNS)
                    ]
                    ratio = statistics.median(with_tls / without for without, with_tls in turns)
                    rates = [statistics.median(column) for column in zip(*turns, strict=True)]
                    more = bytes_per_round(aggregator, tls["a"], size) / bytes_per_round(
                        aggregator, plain["a"], size
                    )
                    print(
                        f"{label:>10}{rates[0]:>11.1f}{rates[1]:>10.1f}{ratio:>7.2f}{more - 1:>9.2%}",
                        flush=True,
                    )
            finally:
                broker.terminate()


if __name__ == "__main__":
    main()

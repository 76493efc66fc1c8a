"""Measurements for docs/evidence/swarm.md, on this machine. `python -m benchmarks.swarm NAME...`:

    fidelity   `testbed calibrate --fidelity`, with devices on both nodes
    services   how fast a Swarm makes what a device needs, and how fast a node's engine answers
    broker     CPU time of Mosquitto per message, by size

The nodes are two engines in namespaces of this machine (`tests.two_engines`, which needs root). They
share its cores, so to each node the other's devices are other work on the host.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

from agents.config import BrokerAccess
from agents.mqtt.topics import AGGREGATOR, CONTROLLER, Topics
from agents.mqtt.transport import Connection
from testbed import images
from testbed.broker import Account, BrokerLimits, Listeners, accounts, find_mosquitto, write_mosquitto
from testbed.host import docker_engine
from testbed.host.nodes import swarm_nodes
from testbed.images import building
from testbed.runtimes.docker.specifications import COMPONENT_LABEL, RUN_LABEL
from testbed.runtimes.process.runtime import HOST, free_ports
from testbed.runtimes.swarm.removal import temporary_proxies
from tests import two_engines
from tests.running import TESTBED
from tests.two_engines import Engine

_SERVICES = 40
_SIZES = {"a sample (163 bytes)": 163, "10,000 parameters": 40_000, "550,000 parameters": 2_200_000}
_BROKER_SECONDS = 5.0
_LOST_SECONDS = 0.5
_TOPICS = Topics("load")
Engines = tuple[Engine, Engine]


@contextmanager
def _engines() -> Iterator[Engines]:
    """Start the manager with all images, and a worker with all that it needs."""
    with closing(docker_engine.connect()) as client:
        building.ensure(client, print)
    tags = images.current_tags(images.FOLDER, images.AGENTS)
    wanted = [tags[kind] for kind in ("agent", "broker", "base")], [tags["agent"], tags["base"]]
    with (
        tempfile.TemporaryDirectory(prefix="testbed-") as folder,
        two_engines.swarm(Path(folder)) as found,
    ):
        with ThreadPoolExecutor() as pool:
            list(pool.map(two_engines.carry, wanted, ([each.url] for each in found)))
        os.environ["DOCKER_HOST"] = found[0].url
        yield found


def _run(*arguments: str | Path) -> None:
    subprocess.run([*TESTBED, *map(str, arguments)], check=True)


def fidelity(_: Engines) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _run("calibrate", "--fidelity", "--runtime", "swarm", "--runs", folder)
        for file in Path(folder).glob("*/manifest.json"):
            print(json.loads(file.read_text())["placement"])


def services(engines: Engines) -> None:
    """Measure services of the base image that sleep, each with two secrets, as a device has."""
    manager, worker = engines
    base = images.current_tags(images.FOLDER, images.AGENTS)["base"]
    api: Any = manager.client.api
    made: list[str] = []
    labels = {RUN_LABEL: "services", COMPONENT_LABEL: "device"}

    def secret(number: int) -> None:
        api.create_secret(f"s-{number}", bytes(1500), labels)

    def service(number: int) -> None:
        task = {
            "ContainerSpec": {"Image": base, "Command": ["sleep", "600"], "Labels": labels},
            "RestartPolicy": {"Condition": "none"},
        }
        made.append(api.create_service(task, name=f"d-{number}", labels=labels)["ID"])

    with ThreadPoolExecutor(8) as pool:
        _timed("secrets", pool, secret, 2 * _SERVICES)
        begin = time.monotonic()
        _timed("services", pool, service, _SERVICES)
        while not _all_run(api, made):
            time.sleep(0.1)
        took = time.monotonic() - begin
        print(f"tasks: {_SERVICES / took:.1f}/s started, on both nodes together")
        nodes = swarm_nodes(manager.client)
        with temporary_proxies(manager.client, nodes, base, "services") as found:
            for node, engine in found.engines.items():
                where = "manager" if node == found.here else "other node, through its engine proxy"
                count = len(engine.api.containers(all=True))
                begin = time.perf_counter()
                for _ in range(50):
                    engine.api.containers(all=True, filters={"label": RUN_LABEL})
                each = (time.perf_counter() - begin) / 50
                print(f"{where}: its {count} containers are listed in {1e3 * each:.1f} ms")
        print("networks:", [n["Name"] for n in worker.client.api.networks()])
        begin = time.monotonic()
        list(pool.map(api.remove_service, made))
        while manager.client.api.containers(filters={"label": RUN_LABEL}):
            time.sleep(0.1)
        print(f"removed: {_SERVICES / (time.monotonic() - begin):.1f}/s")


def _timed(what: str, pool: ThreadPoolExecutor, make: Callable[[int], None], count: int) -> None:
    begin = time.monotonic()
    list(pool.map(make, range(count)))
    print(f"{what}: {count / (time.monotonic() - begin):.0f}/s created", flush=True)


def _all_run(api: Any, made: Sequence[str]) -> bool:
    tasks = api.tasks(filters={"service": list(made)})
    return len([one for one in tasks if one["Status"]["State"] == "running"]) == len(made)


def broker() -> None:
    """Measure one publisher and one subscriber."""
    print(f"{'message':<22}{'messages/s':>11}{'MB/s':>7}{'cores':>7}{'a core carries':>16}")
    for what, size in _SIZES.items():
        made = accounts("load", ["d-0"])
        (port,) = free_ports(1)
        spawn = multiprocessing.get_context("spawn")
        count = spawn.Value("q", -1)
        with tempfile.TemporaryDirectory() as folder:
            conf = write_mosquitto(
                Path(folder) / "broker",
                made,
                Listeners(HOST, port),
                limits=BrokerLimits.for_run(size, 1),
            )
            mosquitto = psutil.Popen(
                [find_mosquitto() or "mosquitto", "-c", str(conf)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                reader = AGGREGATOR if size > 1000 else CONTROLLER
                logins = made[reader].at(HOST, port), _writer(made, size).at(HOST, port)
                reads = spawn.Process(target=_read, args=(logins[0], count), daemon=True)
                writes = spawn.Process(target=_write, args=(logins[1], size, count), daemon=True)
                reads.start()
                while count.value < 0:
                    time.sleep(0.1)
                writes.start()
                while count.value == 0:
                    time.sleep(0.1)
                begin, had, used = time.monotonic(), count.value, _cpu(mosquitto)
                time.sleep(_BROKER_SECONDS)
                took, came, used = (
                    time.monotonic() - begin,
                    count.value - had,
                    _cpu(mosquitto) - used,
                )
                print(
                    f"{what:<22}{came / took:>11.0f}{came * size / took / 1e6:>7.0f}{used / took:>7.2f}"
                    f"{came / used:>14.0f}/s",
                    flush=True,
                )
                writes.terminate()
                reads.terminate()
                writes.join()
                reads.join()
            finally:
                mosquitto.terminate()
                mosquitto.wait()


def _topic(size: int) -> str:
    return _TOPICS.update("d-0") if size > 1000 else _TOPICS.telemetry("d-0")


def _writer(made: Mapping[str, Account], size: int) -> Account:
    return next(one for one in made.values() if one.may_publish(_topic(size)))


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _read(login: BrokerAccess, count: Any) -> None:
    def received(_: object) -> None:
        count.value += 1  # this process is the only writer

    topics = [_TOPICS.update("+")] if login.username == AGGREGATOR else [_TOPICS.telemetry("+")]
    connection = Connection(login, topics, received, largest={"update": 2**32, "telemetry": 2**32})
    connection.open()
    count.value = 0
    time.sleep(600)


def _write(login: BrokerAccess, size: int, count: Any) -> None:
    """Publish as fast as messages arrive at the other end, with a few in flight."""
    connection = Connection(login, [], lambda _: None)
    connection.open()
    payload, sent, progress = b"x" * size, 0, (0, 0.0)
    while True:
        if count.value != progress[0]:
            progress = count.value, time.monotonic()
        if sent - count.value > max(2, min(100, 1_000_000 // size)):
            if time.monotonic() - progress[1] > _LOST_SECONDS:
                sent = count.value  # the broker may drop messages of QoS 0
            time.sleep(0.0005)
            continue
        if size > 1000:
            connection.publish(_topic(size), payload)
        else:
            connection.publish_lossy(_topic(size), payload)
        sent += 1


ON_NODES = {"fidelity": fidelity, "services": services}

if __name__ == "__main__":
    chosen = sys.argv[1:]
    if not chosen or not set(chosen) <= {*ON_NODES, "broker"}:
        sys.exit(f"python -m benchmarks.swarm {' '.join(ON_NODES)} broker")
    if "broker" in chosen:
        broker()
    if wanted := [ON_NODES[name] for name in chosen if name in ON_NODES]:
        with _engines() as made:
            for benchmark in wanted:
                benchmark(made)

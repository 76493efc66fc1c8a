"""Updates per second of a whole run, against bare Mosquitto and paho with the same payload.

    python -m benchmarks.endtoend [--clients 2] [--turns 3] [--seconds 10] [--parameters 550000]

A run is one of `testbed up --runtime process`: broker, aggregator and clients in processes of their
own, FedBuff, a perceptron of 550,000 parameters (2.2 MB each way), of which a step on one sample takes
about a millisecond. An update counts once it is trained, kept by its client, applied, and acknowledged;
with `durability: update`, the default, it is then on the aggregator's disk too. Bare is the least that
carries as much: Mosquitto with its own settings, a server and as many clients, each with a paho client
that answers what comes with a payload of that size, QoS 1; nothing is decoded, checked, applied or kept.
Both have broker and server on the first CPU and the clients on the others. They alternate; the ratios
are to be compared, the figures are this machine's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from analysis.load import load
from testbed.runtimes.process import HOST, find_mosquitto, free_ports

_WARM_S = 3.0
"""From the first model on, before updates count."""
_KINDS = ("bare", "none", "update")
_TASK = """
    from dataclasses import dataclass

    from torch import nn

    from agents.tasks.interface import Task


    @dataclass(frozen=True)
    class Perceptron(Task):
        dataset = "digits"
        hidden: int = 1

        def model(self):
            hidden, scores = nn.Linear(64, self.hidden), nn.Linear(self.hidden, 10)
            return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), scores)
"""
_TOPOLOGY = """
    name: endtoend
    code: code
    task:
      name: perceptron:Perceptron
      hidden: {hidden}
      local: {{steps: 1, batch_size: 1, lr: 0.001}}
    rule: {{name: fedbuff, buffer_size: {clients}}}
    devices: [{{name: client, count: {clients}, cpu: 1}}]
    durability: {durability}
    evaluate: {{every: 1h}}
    stop: {{after: {seconds}s}}
"""
Options = argparse.Namespace


def run(folder: Path, options: Options, durability: str) -> float:
    """Updates per second of a run."""
    hidden = round((options.parameters - 10) / 75)
    (folder / "code").mkdir()
    (folder / "code" / "perceptron.py").write_text(textwrap.dedent(_TASK))
    text = _TOPOLOGY.format(
        hidden=hidden,
        clients=options.clients,
        durability=durability,
        seconds=_WARM_S + options.seconds,
    )
    topology = folder / "endtoend.yaml"
    topology.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "testbed", "up", str(topology), "--oversubscribe"]
    command += ["--runtime", "process", "--runs", str(folder / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the run failed:\n{done.stdout}{done.stderr}")
    (directory,) = (folder / "runs").iterdir()
    applied = load(directory).updates["applied"]
    counted = int((applied >= _WARM_S).sum())
    return counted / float(options.seconds)


def bare(folder: Path, options: Options, mosquitto: str) -> float:
    """Updates per second of paho alone."""
    (port,) = free_ports(1)
    conf = folder / "mosquitto.conf"
    conf.write_text(f"listener {port} {HOST}\nallow_anonymous true\nlog_dest none\n")
    cpus = sorted(os.sched_getaffinity(0))
    mine, others = cpus[:1], cpus[1:] or cpus
    payload = bytes(4 * options.parameters)
    topics = [f"client-{number}" for number in range(options.clients)]
    spawn = multiprocessing.get_context("spawn")
    clients = [
        spawn.Process(target=_answer, args=(port, topic, payload, others), daemon=True)
        for topic in topics
    ]
    os.sched_setaffinity(0, mine)
    try:
        with subprocess.Popen([mosquitto, "-c", conf]) as broker:
            try:
                time.sleep(0.5)
                return _serve(port, payload, clients, options.seconds)
            finally:
                for client in clients:
                    if client.pid is not None:
                        client.kill()
                broker.terminate()
    finally:
        os.sched_setaffinity(0, cpus)


def _serve(port: int, payload: bytes, clients: Sequence[Any], seconds: float) -> float:
    arrived = 0

    def answer(server: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        nonlocal arrived
        arrived += bool(message.payload)
        server.publish(message.topic.replace("update", "model"), payload, qos=1)

    server = paho.Client(CallbackAPIVersion.VERSION2)
    server.on_message = answer
    server.connect(HOST, port)
    server.subscribe("update/+", 1)
    server.loop_start()
    for client in clients:
        client.start()
    deadline = time.monotonic() + 30
    while not arrived and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(_WARM_S)
    before, start = arrived, time.perf_counter()
    time.sleep(seconds)
    found = (arrived - before) / (time.perf_counter() - start)
    server.disconnect()
    server.loop_stop()
    return found


def _answer(port: int, topic: str, payload: bytes, cpus: Sequence[int]) -> None:
    """A client: an update for every model. The first is empty, and says that it is there."""
    os.sched_setaffinity(0, cpus)
    client = paho.Client(CallbackAPIVersion.VERSION2)

    def send(what: bytes) -> None:
        client.publish(f"update/{topic}", what, qos=1)

    client.on_message = lambda *_: send(payload)
    client.on_subscribe = lambda *_: send(b"")
    client.connect(HOST, port)
    client.subscribe(f"model/{topic}", 1)
    client.loop_forever()


def main() -> None:
    options = _options()
    mosquitto = find_mosquitto()
    if mosquitto is None:
        sys.exit("mosquitto is needed: apt-get install mosquitto")
    found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    size = 4 * options.parameters / 1e6
    print(f"{options.clients} clients, {options.parameters:,} parameters ({size:.1f} MB), updates/s")
    print("".join(f"{title:>20}" for title in ("bare", "durability: none", "durability: update")))
    for _ in range(options.turns):
        for kind in _KINDS:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                place = Path(folder)
                rate = bare(place, options, mosquitto) if kind == "bare" else run(place, options, kind)
            found[kind].append(rate)
        print("".join(f"{found[kind][-1]:>20.1f}" for kind in _KINDS), flush=True)
    for kind in _KINDS[1:]:
        ratios = [ours / theirs for ours, theirs in zip(found[kind], found["bare"], strict=True)]
        print(
            f"durability: {kind}: {statistics.median(ratios):.2f} of bare "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


def _options() -> Options:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endtoend")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--parameters", type=int, default=550_000)
    parser.add_argument("--folder", type=Path, default=Path(), help="on whose disk runs are kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Updates per second of a whole run, and CPU time per update, compared with bare Mosquitto and paho.

    python -m benchmarks.endtoend [--clients 2] [--turns 3] [--seconds 10] [--parameters 550000]

All carry the same payload. A run is `testbed up --runtime process`: broker, aggregator and clients as
processes, FedBuff, and a perceptron of 550,000 parameters (2.2 MB each way) whose step on one sample
takes about a millisecond. An update counts when it has been trained, saved by its client, applied, and
acknowledged; with `durability: update`, the default, it is then also on the aggregator's disk. Bare is
the minimum with the same traffic: Mosquitto with its own settings, a server and as many clients, each a
paho client that answers each message with a payload of that size at QoS 1; nothing is decoded, checked,
applied or saved. `bare` sends a payload in one message, as paho's users do. `lean` is the leanest that
we found: chunks of 64 KiB, of which paho copies less, in processes that keep freed memory, as the
testbed's processes do.

Broker and server run on the first CPU, the clients on the others. The variants alternate; compare the
ratios, as the figures are this machine's. On a busy host, updates per second mean little: the longer a
message waits for a CPU, the fewer there are. The CPU time per update (broker, server and clients
together; of a run, all its processes) hardly depends on that.
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
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import paho.mqtt.client as paho
import psutil
from paho.mqtt.enums import CallbackAPIVersion

from agents import events
from analysis.load import load
from testbed.broker import find_mosquitto
from testbed.runtimes.process.runtime import HOST, free_ports

_WARM_S = 3.0
"""Seconds after the first model before updates count."""
_KINDS = ("bare", "lean", "none", "update")
_LEAN = 2**16
"""Bytes of a chunk."""
_KEEPS = {"MALLOC_MMAP_THRESHOLD_": f"{2**25}", "MALLOC_TRIM_THRESHOLD_": f"{2**26}"}
"""Environment by which glibc keeps freed memory, as `agents.process` does."""
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


@dataclass(frozen=True)
class Measured:
    rate: float
    """Updates per second."""
    cost: float
    """CPU time per update of all processes, in milliseconds."""


def run(folder: Path, options: Options, durability: str) -> Measured:
    """Measure a run."""
    hidden = round((options.parameters - 10) / 75)
    (folder / "code").mkdir()
    (folder / "code" / "perceptron.py").write_text(textwrap.dedent(_TASK))
    text = _TOPOLOGY.format(
        hidden=hidden,
        clients=options.clients,
        durability=durability,
        seconds=_WARM_S + options.seconds + 1,
    )
    topology = folder / "endtoend.yaml"
    topology.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "testbed", "up", str(topology), "--oversubscribe"]
    command += ["--runtime", "process", "--runs", str(folder / "runs")]
    with (folder / "output").open("w+") as output:
        with subprocess.Popen(command, stdout=output, stderr=output) as testbed:
            began = _began(folder / "runs", testbed)
            time.sleep(max(0.0, began + _WARM_S - time.time()))
            begin, before = time.time() - began, _cpu_times(psutil.Process(testbed.pid))
            time.sleep(options.seconds)
            end, after = time.time() - began, _cpu_times(psutil.Process(testbed.pid))
        if testbed.returncode:
            output.seek(0)
            sys.exit(f"the run failed:\n{output.read()}")
    (directory,) = (folder / "runs").iterdir()
    applied = load(directory).updates["applied"]
    count = int(((applied >= begin) & (applied < end)).sum())
    return Measured(count / (end - begin), 1e3 * _spent(before, after) / count)


def _began(runs: Path, testbed: subprocess.Popen[bytes]) -> float:
    """Wait for the start of the run clock; return it as Unix time."""
    while testbed.poll() is None:
        for journal in runs.glob("*/events.jsonl"):
            for line in journal.read_text().splitlines():
                if isinstance(record := events.from_line(line), events.RunStarted):
                    return record.wall_clock
        time.sleep(0.1)
    return time.time()  # it failed


def _cpu_times(process: psutil.Process) -> dict[int, float]:
    """CPU seconds of each process that this one has started, directly or indirectly."""
    found = {}
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            used = child.cpu_times()
            found[child.pid] = used.user + used.system
    return found


def _spent(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    return sum(used - before[pid] for pid, used in after.items() if pid in before)


def bare(folder: Path, options: Options, mosquitto: str, *, lean: bool) -> Measured:
    """Measure paho alone."""
    (port,) = free_ports(1)
    conf = folder / "mosquitto.conf"
    conf.write_text(f"listener {port} {HOST}\nallow_anonymous true\nlog_dest none\n")
    cpus = sorted(os.sched_getaffinity(0))
    mine, others = cpus[:1], cpus[1:] or cpus
    size = 4 * options.parameters
    most = _LEAN if lean else size
    payload = [bytes(min(most, size - start)) for start in range(0, size, most)]
    spawn = multiprocessing.get_context("spawn")
    clients = [
        spawn.Process(target=_answer, args=(port, f"client-{number}", payload, others), daemon=True)
        for number in range(options.clients)
    ]
    environment = os.environ | (_KEEPS if lean else {})
    ready, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve, args=(port, payload, theirs), daemon=True)
    os.sched_setaffinity(0, mine)
    try:
        with (
            mock.patch.dict(os.environ, environment),
            subprocess.Popen([mosquitto, "-c", conf]) as broker,
        ):
            try:
                time.sleep(0.5)
                server.start()
                ready.recv()
                for client in clients:
                    client.start()
                time.sleep(_WARM_S + 1)  # they start in the first second
                us = psutil.Process()
                begin, before, first = time.perf_counter(), _cpu_times(us), _asked(ready)
                time.sleep(options.seconds)
                count = _asked(ready) - first
                seconds = time.perf_counter() - begin
                return Measured(count / seconds, 1e3 * _spent(before, _cpu_times(us)) / count)
            finally:
                for process in (server, *clients):
                    if process.pid is not None:
                        process.kill()
                broker.terminate()
    finally:
        os.sched_setaffinity(0, cpus)


def _asked(server: Connection) -> float:
    """Ask the server how many updates have arrived."""
    server.send(None)
    arrived: float = server.recv()
    return arrived


def _serve(port: int, payload: Sequence[bytes], asked: Connection) -> None:
    """Run a server that answers every update with a model."""
    arrived: Counter[str] = Counter()

    def answer(server: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        if message.payload:
            arrived[message.topic] += 1
        if arrived[message.topic] % len(payload) == 0:  # the first message is empty
            for chunk in payload:
                server.publish(message.topic.replace("update", "model"), chunk, qos=1)

    server = paho.Client(CallbackAPIVersion.VERSION2)
    server.on_message = answer
    server.on_subscribe = lambda *_: asked.send(None)
    server.connect(HOST, port)
    server.subscribe("update/+", 1)
    server.loop_start()
    while True:
        asked.recv()
        asked.send(arrived.total() / len(payload))


def _answer(port: int, topic: str, payload: Sequence[bytes], cpus: Sequence[int]) -> None:
    """Run a client that answers every model with an update. Its first message is empty and announces
    it."""
    os.sched_setaffinity(0, cpus)
    client = paho.Client(CallbackAPIVersion.VERSION2)
    arrived = 0

    def begin(*_: Any) -> None:
        client.publish(f"update/{topic}", b"", qos=1)

    def answer(*_: Any) -> None:
        nonlocal arrived
        arrived += 1
        if arrived % len(payload) == 0:
            for chunk in payload:
                client.publish(f"update/{topic}", chunk, qos=1)

    client.on_subscribe, client.on_message = begin, answer
    client.connect(HOST, port)
    client.subscribe(f"model/{topic}", 1)
    client.loop_forever()


def main() -> None:
    options = _options()
    mosquitto = find_mosquitto()
    if mosquitto is None:
        sys.exit("mosquitto is needed: apt-get install mosquitto")
    found: dict[str, list[Measured]] = {kind: [] for kind in _KINDS}
    size = 4 * options.parameters / 1e6
    print(f"{options.clients} clients, {options.parameters:,} parameters ({size:.1f} MB)")
    print("updates/s, and ms of CPU time of one")
    titles = ("bare", "lean", "durability: none", "durability: update")
    print("".join(f"{title:>20}" for title in titles))
    for _ in range(options.turns):
        for kind in _KINDS:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                if kind in ("bare", "lean"):
                    one = bare(Path(folder), options, mosquitto, lean=kind == "lean")
                else:
                    one = run(Path(folder), options, kind)
            found[kind].append(one)
        now = [found[kind][-1] for kind in _KINDS]
        print("".join(f"{one.rate:>12.1f}{one.cost:>8.2f}" for one in now), flush=True)
    for kind in _KINDS[2:]:
        for other in _KINDS[:2]:
            pairs = list(zip(found[kind], found[other], strict=True))
            rates = _spread([ours.rate / theirs.rate for ours, theirs in pairs])
            costs = _spread([ours.cost / theirs.cost for ours, theirs in pairs])
            print(f"durability: {kind} ÷ {other}: updates/s {rates}, CPU time of one {costs}")


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _options() -> Options:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endtoend")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--parameters", type=int, default=550_000)
    parser.add_argument("--folder", type=Path, default=Path(), help="folder for runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()

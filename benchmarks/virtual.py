"""Virtual time, and the local training in it, compared with plain loops over the clients.

    python -m benchmarks.virtual [stacks | cnn | start]

Client-steps (mini-batch steps of one client) per second, and how many times as many as three loops over
the clients in the same run: one as tutorials write it (DataLoader, torch.optim), a lean one in PyTorch
(autograd, SGD by hand), and for logistic regression a lean one in NumPy (gradient by hand, all in
place). Measured are the batched trainer with all clients at once; a whole run of AREA, where far fewer
are pending when the next result is needed; and the trainer by number of clients. `stacks` shows the gain
of training a perceptron's clients as one stack (docs/evidence/virtual-time.md); `cnn` compares small
convolutional networks alone, and shows the CPU time of a step and of its layers; `start`, which is part
of the whole, how long `testbed up` takes until the run clock starts.

All take turns, and the median of each counts. Absolute figures are this machine's. MNIST and CIFAR-10
come from TESTBED_DATA if that is set; otherwise noise of their shape is used, which is as good.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader, Subset, TensorDataset

from agents import events, random_generators
from agents.config import LocalTraining
from agents.models.flat import FlatModule, initial
from agents.models.vectors import Vector
from agents.shards import Shard
from agents.tasks.cnn import Cifar10Cnn, MnistCnn
from agents.tasks.interface import Task
from agents.tasks.logreg import MnistLogreg
from benchmarks import perceptron
from benchmarks.perceptron import Perceptron
from testbed.data import datasets
from testbed.data.preparation import Prepared
from testbed.plan.agent_configs import RunSpec
from testbed.run import preparing
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.topology.partition import Indices
from testbed.view import View
from testbed.virtual import objectives
from testbed.virtual.layers import Layers
from testbed.virtual.run import run
from testbed.virtual.stacked_training import BatchTrainer, Job

_TURNS = 7
_TURN = 0.25
"""Minimum seconds of each contender in every turn."""
_NAMES: dict[type[Task], str] = {
    MnistLogreg: "mnist-logreg",
    Cifar10Cnn: "cifar10-cnn",
    MnistCnn: "mnist-cnn",
    Perceptron: "perceptron:Perceptron",
}
_CLASSES = 10
_STEPS = 1024
"""Approximate number of client-steps of a loop per turn."""
_AT_ONCE = (1, 4, 14, 64, 128)
_STACKS = ((10, 32), (16, 32), (32, 32), (100, 32), (16, 100), (100, 100))
"""Numbers of clients and of hidden units of a perceptron."""
_AREA = {"name": "area", "criterion": "every", "every": 4}
_FEDBUFF = {"name": "fedbuff", "buffer_size": 10, "concurrency": 30}
_FEDBUFF_20 = {"name": "fedbuff", "buffer_size": 10, "concurrency": 20}
_CNN_GOAL = "2.5 times the loop in PyTorch"
_CPU_TURNS, _FEW_CLIENTS = 3, 20
_CALLS = 200
"""Number of calls of a layer. The quickest one counts."""
_STARTS = 5
_WIDTHS = (16, 9, 11, 8, 14, 9)


@dataclass(frozen=True, slots=True)
class Setting:
    """Clients that train at the same time, each from a model of its own."""

    label: str
    task: Task
    train: Shard
    clients: int
    batch_size: int
    steps: int
    updates: int
    """Number of updates of a whole run."""
    lr: float = 0.05
    rule: Mapping[str, Any] = field(default_factory=lambda: _AREA)
    goal: str = ""
    """Goal for a whole run."""

    def parts(self) -> list[Indices]:
        """Samples of each client, as indices into `train`."""
        return np.array_split(np.random.default_rng(0).permutation(len(self.train)), self.clients)

    def starts(self) -> list[Vector]:
        rng = np.random.default_rng(1)
        w = initial(self.task.model())
        return [w + rng.normal(0, 0.01, w.size).astype(np.float32) for _ in range(self.clients)]


def settings() -> list[Setting]:
    mnist = _images("ylecun/mnist", (60_000, 28, 28))
    cifar = _images("uoft-cs/cifar10", (50_000, 3, 32, 32))
    logreg, cnn, mlp = MnistLogreg(), Cifar10Cnn(), Perceptron()
    return [
        Setting(
            "mnist-logreg, FedBuff, M = 20",
            logreg,
            mnist,
            100,
            batch_size=32,
            steps=20,
            updates=2000,
            rule=_FEDBUFF,
            goal="33,000 per second",
        ),
        Setting(
            "mnist-logreg, M = 1",
            logreg,
            mnist,
            128,
            batch_size=32,
            steps=1,
            updates=4000,
            goal="8,000 per second",
        ),
        Setting("mnist-logreg, M = 50", logreg, mnist, 128, batch_size=32, steps=50, updates=1000),
        Setting("perceptron, M = 10", mlp, mnist, 10, batch_size=16, steps=10, updates=1000),
        Setting("perceptron, M = 10", mlp, mnist, 100, batch_size=16, steps=10, updates=1000),
        Setting(
            "cifar10-cnn, M = 5",
            cnn,
            cifar,
            100,
            batch_size=10,
            steps=5,
            updates=200,
            goal=_CNN_GOAL,
        ),
        *(
            Setting(
                f"{_NAMES[type(task)]}, batch 16, FedBuff, M = 20",
                task,
                images,
                100,
                batch_size=16,
                steps=20,
                updates=100,
                rule=_FEDBUFF_20,
                goal=_CNN_GOAL,
            )
            for task, images in ((cnn, cifar), (MnistCnn(), mnist))
        ),
    ]


def _images(dataset: str, shape: tuple[int, ...]) -> Shard:
    if root := os.environ.get("TESTBED_DATA"):
        return datasets.load(dataset, Path(root)).train
    rng = np.random.default_rng(0)
    return Shard(rng.integers(0, 256, shape, np.uint8), rng.integers(0, 10, shape[0]), 1 / 255)


class Tutorial:
    """A loop over clients as tutorials write it: DataLoader, torch.optim, one module."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._model = setting.task.model()
        x = torch.from_numpy(setting.train.x).float() * setting.train.scale
        data = TensorDataset(x, torch.from_numpy(setting.train.y))
        self._parts = [Subset(data, part.tolist()) for part in setting.parts()]
        self._start = copy.deepcopy(self._model.state_dict())

    def train(self, client: int) -> tuple[dict[str, torch.Tensor], float]:
        setting, model = self.setting, self._model
        model.load_state_dict(self._start)
        optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr, weight_decay=setting.task.l2)
        loader = DataLoader(self._parts[client], batch_size=setting.batch_size, shuffle=True)
        total = 0.0
        for x, y in itertools.islice(
            itertools.chain.from_iterable(itertools.repeat(loader)), setting.steps
        ):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item()
        return copy.deepcopy(model.state_dict()), total / setting.steps


class Lean:
    """A loop over clients in PyTorch without its helpers: index batches, SGD by hand."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._model = setting.task.model()
        self._x = torch.from_numpy(setting.train.x).float() * setting.train.scale
        self._y = torch.from_numpy(setting.train.y)
        self._parts = [torch.from_numpy(part) for part in setting.parts()]
        self._starts = []
        for vector in setting.starts():
            vector_to_parameters(torch.from_numpy(vector), self._model.parameters())
            self._starts.append(copy.deepcopy(self._model.state_dict()))

    def train(self, client: int) -> tuple[dict[str, torch.Tensor], float]:
        setting, model, part = self.setting, self._model, self._parts[client]
        model.load_state_dict(self._starts[client])
        total = 0.0
        batches: list[torch.Tensor] = []
        for _ in range(setting.steps):
            if not batches:
                batches = list(torch.split(part[torch.randperm(len(part))], setting.batch_size))
            batch = batches.pop(0)
            loss = torch.nn.functional.cross_entropy(model(self._x[batch]), self._y[batch])
            model.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(setting.lr * (p.grad + setting.task.l2 * p))
            total += loss.item()
        return copy.deepcopy(model.state_dict()), total / setting.steps


class Hand:
    """The leanest loop over clients: logistic regression's gradient by hand, in NumPy, in memory that is
    allocated once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._x = setting.train.x.reshape(len(setting.train), -1)
        self._y = setting.train.y
        self._parts, self._starts = setting.parts(), setting.starts()
        self._rng = np.random.default_rng(2)
        inputs, width = self._x.shape[1], setting.batch_size
        self._w = np.empty_like(self._starts[0])
        self._weights = self._w[: _CLASSES * inputs].reshape(_CLASSES, inputs)
        self._bias = self._w[_CLASSES * inputs :]
        self._gradient = np.empty_like(self._weights)
        self._pixels = np.empty((width, inputs), self._x.dtype)
        self._inputs = np.empty((width, inputs), np.float32)
        self._outputs = np.empty((_CLASSES, width), np.float32)  # sums over classes add whole rows
        self._places = np.arange(width)

    def train(self, client: int) -> tuple[Vector, float]:
        setting, part = self.setting, self._parts[client]
        np.copyto(self._w, self._starts[client])
        total, taken = 0.0, len(part)
        for _ in range(setting.steps):
            if taken >= len(part):
                order, taken = part[self._rng.permutation(len(part))], 0
            batch = order[taken : taken + setting.batch_size]
            taken += len(batch)
            total += self._step(batch)
        return self._w.copy(), total / setting.steps

    def _step(self, batch: Indices) -> float:
        n, setting = len(batch), self.setting
        x, p, places = self._inputs[:n], self._outputs[:, :n], self._places[:n]
        np.copyto(x, self._x.take(batch, 0, self._pixels[:n], "clip"))
        y, scale = self._y.take(batch), np.float32(setting.train.scale)
        np.matmul(self._weights, x.T, out=p)
        p *= scale
        p += self._bias[:, None]
        p -= p.max(0)
        loss = -float(p[y, places].sum())
        np.exp(p, out=p)
        sums = p.sum(0)
        loss += float(np.log(sums).sum())
        p /= sums
        p[y, places] -= 1
        p *= np.float32(setting.lr / n)
        self._w *= np.float32(1 - setting.lr * setting.task.l2)
        self._bias -= p.sum(1)
        p *= scale
        np.matmul(p, x, out=self._gradient)
        self._weights -= self._gradient
        return loss / n


class Batched:
    """The virtual runtime's trainer, with `at_once` clients at a time."""

    def __init__(self, setting: Setting, at_once: int) -> None:
        self._setting = setting
        self._trainer = BatchTrainer(setting.task, setting.train)
        self._parts, self._starts = setting.parts(), setting.starts()
        self._groups = [
            range(setting.clients)[k : k + at_once] for k in range(0, setting.clients, at_once)
        ]
        self._round = 0

    def client_steps(self) -> int:
        """Train every client once; return how many steps that was."""
        self._round += 1
        for group in self._groups:
            self._trainer.run([self._job(client) for client in group])
        return self._setting.clients * self._setting.steps

    def _job(self, client: int) -> Job:
        setting = self._setting
        local = LocalTraining(steps=setting.steps, batch_size=setting.batch_size, lr=setting.lr)
        rng = functools.partial(
            random_generators.client_generator,
            0,
            f"client-{client}",
            random_generators.TRAINING,
            self._round,
        )
        return Job(
            start=self._starts[client],
            indices=self._parts[client],
            local=local,
            lr=setting.lr,
            steps=setting.steps,
            rng=rng,
        )


class WholeRun:
    """A run in virtual time: rule, aggregator, clients, records and journal included."""

    def __init__(self, setting: Setting) -> None:
        topology: dict[str, Any] = {
            "name": "benchmark",
            **({"code": perceptron.__file__} if type(setting.task) is Perceptron else {}),
            "task": {
                "name": _NAMES[type(setting.task)],
                **vars(setting.task),
                "local": {"steps": setting.steps, "batch_size": setting.batch_size, "lr": setting.lr},
            },
            "rule": dict(setting.rule),
            "devices": [
                {
                    "name": "client",
                    "count": setting.clients,
                    "timing": {"distribution": "exponential", "rate": 1},
                    "speed": {"distribution": "normal", "mean": 10, "std": 5},
                }
            ],
            "evaluate": {"every": "1h"},
            "stop": {"updates": setting.updates},
            "runtime": {"name": "virtual"},
        }
        self._steps = setting.updates * setting.steps
        self._topology = yaml.safe_dump(topology)
        parts = {f"client-{k + 1}": part for k, part in enumerate(setting.parts())}
        test = Shard(setting.train.x[:100], setting.train.y[:100], setting.train.scale)
        self._prepared = Prepared(setting.train, test, parts)

    def client_steps(self) -> int:
        """Run it once; return the number of steps in its updates."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "topology.yaml"
            path.write_text(self._topology, encoding="utf-8")
            topology, plan = preparing.plan_file(path, Options())
            directory = RunDirectory.create(Path(folder), "run")
            preparing.write_inputs(topology, plan, directory)
            samples = {client: len(part) for client, part in self._prepared.indices.items()}
            run(RunSpec(directory, topology, plan, samples), self._prepared, View())
        return self._steps


def seconds_per_step(*contenders: Callable[[], int]) -> list[float]:
    """Seconds per client-step of each contender: the median of several turns.

    They take turns, so that other work on the host slows all of them.
    """
    for contender in contenders:
        contender()  # warms up caches and memory
    seconds: list[list[float]] = [[] for _ in contenders]
    for _ in range(_TURNS):
        for contender, own in zip(contenders, seconds, strict=True):
            started, steps = time.perf_counter(), 0
            while (spent := time.perf_counter() - started) < _TURN:
                steps += contender()
            own.append(spent / steps)
    return [statistics.median(own) for own in seconds]


def one_by_one(loop: Tutorial | Lean | Hand) -> list[Callable[[], int]]:
    """With all threads that torch uses, and with one, which is often faster: the better one counts."""

    def client_steps(threads: int) -> int:
        """Train some of the clients; return how many steps that was."""
        torch.set_num_threads(threads)
        clients = min(loop.setting.clients, max(1, _STEPS // loop.setting.steps))
        for client in range(clients):
            loop.train(client)
        torch.set_num_threads(most)  # the next contender starts with all threads
        return clients * loop.setting.steps

    most = torch.get_num_threads()
    counts = {1} if isinstance(loop, Hand) else {1, most}
    return [functools.partial(client_steps, threads) for threads in counts]


def loops(setting: Setting) -> dict[str, list[Callable[[], int]]]:
    """Return the loops over the clients, by name; the NumPy loop only for logistic regression."""
    found = {"tutorial": one_by_one(Tutorial(setting)), "PyTorch": one_by_one(Lean(setting))}
    if isinstance(setting.task, MnistLogreg):
        found["NumPy"] = one_by_one(Hand(setting))
    return found


def compare(setting: Setting) -> None:
    """Compare the trainer with all clients at once, and a whole run, with one client at a time."""
    slow = loops(setting)
    contenders = Batched(setting, setting.clients).client_steps, WholeRun(setting).client_steps
    trainer, whole, *times = seconds_per_step(*contenders, *itertools.chain(*slow.values()))
    left = iter(times)
    best = {name: min(next(left) for _ in each) for name, each in slow.items()}
    heading = f"{setting.label}, {setting.clients} clients"
    print(f"\n{heading:<32}{'per second':>8}{'trainer ÷':>12}{'whole run ÷':>12}")
    print(f"{'trainer':>20}{1 / trainer:>20.0f}")
    goal = f"   to reach: {setting.goal}" if setting.goal else ""
    print(f"{'whole run':>20}{1 / whole:>20.0f}{goal}")
    for name, seconds in best.items():
        ratios = f"{seconds / trainer:>12.2f}{seconds / whole:>12.2f}"
        print(f"{name:>20}{1 / seconds:>20.0f}{ratios}")


def by_number_at_once(setting: Setting) -> None:
    """Measure the cost of training few clients at once."""
    contenders = [Batched(setting, number).client_steps for number in _AT_ONCE]
    *times, loop = seconds_per_step(*contenders, *one_by_one(Hand(setting)))
    print(f"\n{setting.label}: {1e6 * loop:.0f} µs per client-step of the NumPy loop; the trainer,")
    print(f"{'clients at once':>16}{'µs':>8}{'ratio':>7}")
    for number, seconds in zip(_AT_ONCE, times, strict=True):
        print(f"{number:>16}{1e6 * seconds:>8.1f}{loop / seconds:>7.2f}")


def without_stacks(contender: Callable[[], int]) -> Callable[[], int]:
    """Return the same contender with each client trained by itself, never as a stack."""

    def client_steps() -> int:
        with patch.object(objectives, "_FEW", sys.maxsize):
            return contender()

    return client_steps


def stacks() -> None:
    """Measure the gain of training the clients of a perceptron as one stack."""
    mnist, threads = _images("ylecun/mnist", (60_000, 28, 28)), torch.get_num_threads()
    print(f"µs per client-step of a perceptron on MNIST, 10 steps of 16 samples, {threads} threads\n")
    for heads in (
        ("all clients", "in", "one after", "lean", "a whole run", "without"),
        ("at once, units", "stacks", "the other", "loop", "of AREA", "stacks"),
    ):
        _row(*heads)
    for clients, hidden in _STACKS:
        torch.set_num_threads(threads)  # the loops change it
        task = Perceptron(hidden=hidden)
        setting = Setting("perceptron", task, mnist, clients, batch_size=16, steps=10, updates=300)
        stacked, whole = Batched(setting, clients).client_steps, WholeRun(setting).client_steps
        with patch.object(objectives, "_FEW", sys.maxsize):  # read when a trainer is made
            single = Batched(setting, clients).client_steps
        contenders = stacked, without_stacks(single), whole, without_stacks(whole)
        together, apart, run, plain, *loop = (
            1e6 * each for each in seconds_per_step(*contenders, *one_by_one(Lean(setting)))
        )
        figures = f"{clients}, {hidden}", *map(round, (together, apart, min(loop), run, plain))
        print(
            "".join(f"{one:>{width}}" for one, width in zip(figures, _WIDTHS, strict=True)), flush=True
        )


def cnns() -> None:
    """Compare training of small convolutional networks; measure the CPU time of steps and layers."""
    for setting in settings():
        if isinstance(setting.task, Cifar10Cnn | MnistCnn):
            print_cpu_time(setting)
            print_layers(setting)
            compare(setting)


def print_cpu_time(setting: Setting) -> None:
    """Measure the CPU time of a step on one thread. Other work on the host hardly changes it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    setting = replace(setting, clients=_FEW_CLIENTS)
    lean, trainer = Lean(setting), Batched(setting, setting.clients)
    steps = setting.clients * setting.steps

    def loop() -> None:
        for client in range(setting.clients):
            lean.train(client)

    turns = []
    for _ in range(_CPU_TURNS):
        started = time.process_time()
        loop()
        halfway = time.process_time()
        trainer.client_steps()
        turns.append((halfway - started, time.process_time() - halfway))
    torch.set_num_threads(threads)
    one, other = (1e6 * min(times) / steps for times in zip(*turns, strict=True))
    print(f"\n{setting.label}: CPU time of a step, one thread: loop in PyTorch {one:.0f} µs, ", end="")
    print(f"trainer {other:.0f} µs, ratio {one / other:.2f}")


def print_layers(setting: Setting) -> None:
    """Measure forward and backward pass of each layer on one thread: the quickest of many calls."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    flat = FlatModule(setting.task.model())
    layers = Layers.from_module(setting.task, flat.module)
    assert layers is not None  # noqa: S101
    batch = setting.train.subset(np.arange(setting.batch_size))
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        spent = time.perf_counter() - started
        seconds[name] = min(seconds.get(name, spent), spent)
        return result

    x, y = batch.tensors()
    for module in layers.unlearned:
        x = module(x)
    names = [f"{type(layer).__name__[1:]} {k + 1}" for k, layer in enumerate(layers.layers)]
    for _ in range(_CALLS):
        with torch.inference_mode():
            out = x
            for name, layer in zip(names, layers.layers, strict=True):
                out = timed(name, functools.partial(layer.forward, out))
            _, g = timed("Loss", functools.partial(layers.loss, out, y))
            for name, layer in reversed([*zip(names, layers.layers, strict=True)]):
                needs_input = layer is not layers.layers[0]
                g = timed(name + "'", functools.partial(layer.backward, g, needs_input=needs_input))
    torch.set_num_threads(threads)
    print("  µs: " + ", ".join(f"{name} {1e6 * each:.0f}" for name, each in seconds.items()))
    print(f"  sum: {1e6 * sum(seconds.values()):.0f}")


def print_start() -> None:
    """Measure how long `testbed up` takes before the run clock starts."""
    task = "mnist-logreg" if os.environ.get("TESTBED_DATA") else "digits-logreg"
    topology = {
        "name": "start",
        "task": {"name": task, "local": {"steps": 1}},
        "rule": {"name": "fedbuff"},
        "devices": [{"name": "client", "count": 100, "timing": "1s"}],
        "stop": {"updates": 10},
        "runtime": {"name": "virtual"},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "topology.yaml"
        path.write_text(yaml.safe_dump(topology), encoding="utf-8")
        seconds = [_until_the_clock_starts(path, Path(folder) / str(k)) for k in range(_STARTS + 1)]
    median = statistics.median(seconds[1:])  # the first one fills the caches
    print(f"\n{task}, 100 clients, seconds until the run clock starts: {median:.2f}   to reach: 1.5")


def _until_the_clock_starts(topology: Path, runs: Path) -> float:
    """Seconds from the command until the run clock starts."""
    began = time.time()
    command = [sys.executable, "-m", "testbed", "up", str(topology), "--runs", str(runs)]
    subprocess.run(command, check=True, capture_output=True)
    (journal,) = runs.glob("*/events.jsonl")
    return next(r.wall_clock for r in events.read(journal) if isinstance(r, events.RunStarted)) - began


def _row(*cells: object) -> None:
    print("".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)), flush=True)


def main() -> None:
    if sys.argv[1:] == ["stacks"]:
        stacks()
        return
    if sys.argv[1:] == ["cnn"]:
        cnns()
        return
    if sys.argv[1:] == ["start"]:
        print_start()
        return
    print("Client-steps per second, and how many times as many as each loop over the clients")
    for setting in settings():
        compare(setting)
    by_number_at_once(settings()[1])
    print_start()


if __name__ == "__main__":
    main()

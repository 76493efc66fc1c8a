"""Use of this host's GPU in a run. On a host without a GPU it prints why it cannot run, and exits with
2.

    python -m benchmarks.gpu shares      # devices with 25, 50 and 100 % of a GPU: alone, side by side
    python -m benchmarks.gpu processes   # the same limits, of MPS, for processes
    python -m benchmarks.gpu virtual     # client steps/s of virtual time: GPU, CPU, one client at a time

`shares` runs in containers (needs docker, NVIDIA's container toolkit and MPS: docs/evidence/gpu.md),
`processes` needs MPS, `virtual` only a PyTorch with CUDA. Compare ratios within one call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from agents.client.training import Trainer
from agents.config import LocalTraining
from agents.models.flat import initial
from agents.node import mps
from agents.shards import Shard, model_inputs
from agents.tasks.cnn import Cifar10Cnn, MnistCnn
from agents.tasks.interface import Task
from agents.tasks.resnet import Cifar10ResNet18
from agents.tasks.shakespeare import ShakespeareLstm
from testbed.errors import TestbedError
from testbed.host.gpus import GpuMeter, Gpus, Use
from testbed.plan import this_host
from testbed.run import preparing, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.topology import parse
from testbed.view import View
from testbed.virtual.stacked_training import BatchTrainer, Job

_SHARES = 0.25, 0.5, 1.0
_CLIENTS, _BATCH = 100, 32
_LARGE_BATCH = 512
"""Samples of a step that keeps all multiprocessors busy, so that a share of them makes it longer."""
_LOOP_CLIENTS = 5
"""Clients that are trained one after the other in a round."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["shares", "processes", "virtual", "trainer"])
    parser.add_argument("--seconds", type=int, default=60, help="seconds of each run with shares")
    given = parser.parse_args()
    try:
        if given.what == "shares":
            return _shares(given.seconds)
        if given.what == "processes":
            return _processes(given.seconds)
        if given.what == "trainer":
            return _trainer(given.seconds)
        return _virtual()
    except TestbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _shares(seconds: int) -> int:
    gpus = this_host(gpus=True).gpus
    if (lack := gpus.lack or gpus.lack_of_mps) is not None:
        return _cannot(str(lack))
    print(
        f"GPU: {gpus.found[0].name}; seconds per training (median) of cifar10-resnet18, 10 steps of 32"
    )
    print("share  alone  side by side  ratio to 100% alone")
    with tempfile.TemporaryDirectory(prefix="testbed-gpu-") as folder:
        alone = {share: _trainings(Path(folder), [share], seconds)[share] for share in _SHARES}
        beside = _trainings(Path(folder), list(_SHARES), seconds)
    for share in _SHARES:
        ratio = alone[share] / alone[1.0]
        print(f"{share:5.0%}  {alone[share]:5.2f}  {beside[share]:12.2f}  {ratio:19.2f}")
    return 0


def _trainings(folder: Path, shares: list[float], seconds: int) -> Mapping[float, float]:
    """Median seconds of a training of the devices with these shares, in one run."""
    from analysis.load import load

    # With a memory limit, so that a device with all multiprocessors uses MPS, too, like the others.
    devices = "\n".join(
        f"  - {{name: d{100 * share:.0f}, cpu: 1, memory: 4GiB, gpu: {{share: {share}, memory: 4GiB}}}}"
        for share in shares
    )
    topology = parse(
        f"name: shares\ntask: {{name: cifar10-resnet18, local: {{steps: 10, batch_size: 32}}}}\n"
        f"rule: {{name: fedasync}}\nstop: {{after: {seconds}s}}\ndevices:\n{devices}\n"
    )
    options = Options("docker", oversubscribe=True)
    plan = preparing.plan_topology(topology, options)
    directory = RunDirectory.new(folder, topology.name)
    up.run(topology, plan, directory, options, View())
    updates = load(directory.path).updates
    took = (updates["train_end"] - updates["train_start"]).groupby(updates["client"], observed=True)
    medians = took.median()
    return {share: float(medians[f"d{100 * share:.0f}"]) for share in shares}


def _processes(seconds: int) -> int:
    gpus = this_host(gpus=True).gpus
    if not gpus.found or gpus.lack_of_mps is not None:
        return _cannot(str(gpus.lack_of_mps or gpus.lack))
    print(f"GPU: {gpus.found[0].name}; steps/s of cifar10-resnet18, {_LARGE_BATCH} samples a step")
    print("share  alone  side by side  ratio to 100% alone  MiB, by NVML; as client of MPS")
    with tempfile.TemporaryDirectory(prefix="testbed-mps-") as folder:
        daemon = subprocess.Popen([sys.executable, "-m", "agents.node.mps", folder])
        try:
            while daemon.poll() is None and not (Path(folder) / mps.READY).exists():
                time.sleep(0.1)
            alone = {share: _side_by_side(folder, [share], seconds, gpus)[share] for share in _SHARES}
            beside = _side_by_side(folder, list(_SHARES), seconds, gpus)
        finally:
            daemon.terminate()
            daemon.wait()
    for share in _SHARES:
        (rate, uses), ratio = alone[share], alone[share][0] / alone[1.0][0]
        seen = ", ".join(f"{(use.memory or 0) >> 20} {use.mps}" for use in uses)
        print(
            f"{share:5.0%}  {rate:5.1f}  {beside[share][0]:12.1f}  {ratio:19.2f}  {seen or 'not seen'}"
        )
    return 0


def _side_by_side(
    folder: str, shares: list[float], seconds: int, gpus: Gpus
) -> dict[float, tuple[float, list[Use]]]:
    """Steps/s of trainers with these shares that run together, and what NVML says of each at its
    largest use of memory."""
    programs = {}
    for share in shares:
        limits = mps.limit_variables(share, 8 << 30, len(gpus.found))
        programs[share] = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", "trainer", "--seconds", str(seconds)],
            env={**os.environ, **mps.environment(folder), **limits},
            stdout=subprocess.PIPE,
            text=True,
        )
    meter = GpuMeter([gpu.uuid for gpu in gpus.found])
    largest: dict[int, Use] = {}
    while any(program.poll() is None for program in programs.values()):
        for pid, use in meter.read().items():
            if pid not in largest or (use.memory or 0) > (largest[pid].memory or 0):
                largest[pid] = use
        time.sleep(0.5)
    meter.close()
    return {
        share: (
            float(program.communicate()[0]),
            [use for pid, use in largest.items() if pid == program.pid],
        )
        for share, program in programs.items()
    }


def _trainer(seconds: int) -> int:
    """Print the steps/s of a client that trains for some seconds."""
    setting = _SETTINGS[-1]
    samples = setting.data().subset(np.arange(_LARGE_BATCH))
    local = LocalTraining(steps=setting.steps, batch_size=_LARGE_BATCH)
    trainer = Trainer(setting.task, samples, local, device="cuda")
    start, rates = initial(setting.task.model()), []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.perf_counter()
        trainer.train(start, np.random.default_rng(0))
        rates.append(setting.steps / (time.perf_counter() - begin))
    print(statistics.median(rates))
    return 0


def _virtual() -> int:
    if (lack := this_host(cuda=True).lack_of_cuda) is not None:
        return _cannot(lack)
    print(f"GPU: {torch.cuda.get_device_name(0)}; {_CLIENTS} clients, {_BATCH} samples a step; steps/s")
    print("task              plain loop  client alone  virtual, GPU  virtual, CPU  GPU ÷ plain loop")
    for setting in _SETTINGS:
        task, train = setting.task, setting.data()
        loop = _rate(setting, partial(_plain_loop, setting, train))
        alone = _rate(setting, partial(_one_at_a_time, setting, train))
        trainers = [BatchTrainer(task, train, device=device) for device in ("cuda", "cpu")]
        gpu = _rate(setting, partial(_together, setting, trainers[0], _CLIENTS))
        cpu = _rate(setting, partial(_together, setting, trainers[1], setting.on_cpu))
        rates = f"{loop:10.0f}  {alone:12.0f}  {gpu:12.0f}  {cpu:12.0f}  {gpu / loop:15.1f}"
        print(f"{setting.name:16}  {rates}")
        if trainers[0].remark is not None:
            print(trainers[0].remark)
    return 0


@dataclass(frozen=True)
class _Setting:
    """A task, with random samples: the time of a step does not depend on their content."""

    name: str
    task: Task
    shape: tuple[int, ...]
    classes: int = 10
    steps: int = 20
    samples: int = 320
    """Samples of each client."""
    on_cpu: int = 20
    """Clients that are trained for the figure on the CPU."""
    tokens: bool = False

    def data(self) -> Shard:
        rng, count = np.random.default_rng(0), _CLIENTS * self.samples
        y = rng.integers(0, self.classes, count)
        if self.tokens:
            return Shard(rng.integers(0, self.classes, (count, *self.shape)), y)
        return Shard(rng.integers(0, 256, (count, *self.shape), np.uint8), y, 1 / 255)

    def local(self) -> LocalTraining:
        return LocalTraining(steps=self.steps, batch_size=_BATCH)


_SETTINGS = (
    _Setting("mnist-cnn", MnistCnn(), (28, 28)),
    _Setting("cifar10-cnn", Cifar10Cnn(), (3, 32, 32)),
    _Setting("shakespeare-lstm", ShakespeareLstm(), (80,), 80, steps=5, on_cpu=2, tokens=True),
    _Setting(
        "cifar10-resnet18", Cifar10ResNet18(norm="group"), (3, 32, 32), steps=3, samples=96, on_cpu=1
    ),
)


def _plain_loop(setting: _Setting, train: Shard) -> int:
    """Train the clients one after the other as a lean PyTorch program does: samples on the GPU, SGD on
    all tensors at once, no value read back in a step."""
    module = setting.task.model().cuda()
    x, y = (torch.from_numpy(part).cuda() for part in (train.x, train.y))
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    sgd = torch.optim.SGD(module.parameters(), lr=0.1, foreach=True)
    for client in range(_LOOP_CLIENTS):
        module.load_state_dict(start)
        order = client * setting.samples + torch.randperm(setting.samples, device="cuda")
        for step in range(setting.steps):
            batch = order[step * _BATCH % setting.samples :][:_BATCH]
            sgd.zero_grad()
            outputs = module(model_inputs(x[batch], train.scale))
            torch.nn.functional.cross_entropy(outputs, y[batch]).backward()  # type: ignore[no-untyped-call]
            sgd.step()
    return _LOOP_CLIENTS


def _cannot(lack: str) -> int:
    print(f"Nothing can be measured here: {lack}", file=sys.stderr)
    return 2


def _one_at_a_time(setting: _Setting, train: Shard) -> int:
    """Train the clients one after the other, each on its own samples, as devices do."""
    trainer = Trainer(setting.task, train.subset(np.arange(1)), setting.local(), device="cuda")
    start = initial(setting.task.model())
    for client in range(_LOOP_CLIENTS):
        indices = np.arange(client * setting.samples, (client + 1) * setting.samples)
        trainer.assign(train.subset(indices), setting.local())
        trainer.train(start, np.random.default_rng(client))
    return _LOOP_CLIENTS


def _together(setting: _Setting, trainer: BatchTrainer, clients: int) -> int:
    """Train the clients in flight together, as virtual time does."""
    start = initial(setting.task.model())
    trainer.run(
        [
            Job(
                start=start,
                indices=np.arange(client * setting.samples, (client + 1) * setting.samples),
                local=setting.local(),
                lr=0.1,
                steps=setting.steps,
                rng=partial(np.random.default_rng, client),
            )
            for client in range(clients)
        ]
    )
    return clients


def _rate(setting: _Setting, work: Callable[[], int]) -> float:
    """Client steps per second: the median of three rounds, after a first one that does not count."""
    work()
    rates = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        clients = work()
        torch.cuda.synchronize()
        rates.append(clients * setting.steps / (time.perf_counter() - begin))
    return statistics.median(rates)


if __name__ == "__main__":
    sys.exit(main())

"""Use of this host's GPU in a run. On a host without a GPU it prints why it cannot run, and exits with
2.

    python -m benchmarks.gpu shares      # devices with 25, 50 and 100 % of a GPU: alone, side by side
    python -m benchmarks.gpu virtual     # client steps/s of virtual time: GPU, CPU, one client at a time

`shares` runs in containers (needs docker, NVIDIA's container toolkit and MPS: docs/evidence/gpu.md);
`virtual` needs only a PyTorch with CUDA. Compare ratios within one call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from agents.client.training import Trainer
from agents.config import LocalTraining
from agents.models.flat import initial
from agents.shards import Shard
from agents.tasks import TASKS
from agents.tasks.interface import Task
from testbed.errors import TestbedError
from testbed.plan import this_host
from testbed.run import planning, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.topology import parse
from testbed.view import View
from testbed.virtual.stacked_training import BatchTrainer, Job

_SHARES = 0.25, 0.5, 1.0
_CLIENTS, _SAMPLES, _STEPS, _BATCH = 100, 600, 20, 32
_CLASSES = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["shares", "virtual"])
    parser.add_argument("--seconds", type=int, default=60, help="seconds of each run of `shares`")
    given = parser.parse_args()
    try:
        if given.what == "shares":
            return _shares(given.seconds)
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
    plan = planning.plan_topology(topology, options)
    directory = RunDirectory.new(folder, topology.name)
    up.run(topology, plan, directory, options, View())
    updates = load(directory.path).updates
    took = (updates["train_end"] - updates["train_start"]).groupby(updates["client"], observed=True)
    medians = took.median()
    return {share: float(medians[f"d{100 * share:.0f}"]) for share in shares}


def _virtual() -> int:
    if (lack := this_host(cuda=True).lack_of_cuda) is not None:
        return _cannot(lack)
    print(f"GPU: {torch.cuda.get_device_name(0)}; {_CLIENTS} clients, {_STEPS} steps of {_BATCH} each")
    print(
        "task            one at a time, GPU   virtual, GPU   virtual, CPU   steps/s; GPU ÷ one at a time"
    )
    for name in ("mnist-cnn", "cifar10-cnn"):
        task: Task = TASKS[name]()
        train = _data(32 if name.startswith("cifar") else 28, 3 if name.startswith("cifar") else 0)
        single = _rate(
            partial(_one_at_a_time, task, train, Trainer(task, train, _local(), device="cuda"))
        )
        gpu, cpu = (
            _rate(partial(_together, task, BatchTrainer(task, train, device=device)))
            for device in ("cuda", "cpu")
        )
        print(f"{name:14}  {single:18.0f}   {gpu:12.0f}   {cpu:12.0f}   {gpu / single:29.1f}")
    return 0


def _cannot(lack: str) -> int:
    print(f"Nothing can be measured here: {lack}", file=sys.stderr)
    return 2


def _local() -> LocalTraining:
    return LocalTraining(steps=_STEPS, batch_size=_BATCH)


def _data(side: int, channels: int) -> Shard:
    """Make random images: the time of a step does not depend on their content."""
    rng, count = np.random.default_rng(0), _CLIENTS * _SAMPLES
    shape = (count, channels, side, side) if channels else (count, side, side)
    return Shard(rng.integers(0, 256, shape, np.uint8), rng.integers(0, _CLASSES, count), 1 / 255)


def _one_at_a_time(task: Task, train: Shard, trainer: Trainer) -> None:
    """Train the clients one after the other, each on its own samples, as real clients do."""
    start = initial(task.model())
    for client in range(_CLIENTS):
        indices = np.arange(client * _SAMPLES, (client + 1) * _SAMPLES)
        trainer.assign(train.subset(indices), _local())
        trainer.train(start, np.random.default_rng(client))


def _together(task: Task, trainer: BatchTrainer) -> None:
    """Train the clients in flight together, as virtual time does."""
    start = initial(task.model())
    trainer.run(
        [
            Job(
                start=start,
                indices=np.arange(client * _SAMPLES, (client + 1) * _SAMPLES),
                local=_local(),
                lr=0.1,
                steps=_STEPS,
                rng=partial(np.random.default_rng, client),
            )
            for client in range(_CLIENTS)
        ]
    )


def _rate(work: partial[None]) -> float:
    """Client steps per second: the median of three rounds, after a first one that does not count."""
    work()
    took = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return _CLIENTS * _STEPS / statistics.median(took)


if __name__ == "__main__":
    sys.exit(main())

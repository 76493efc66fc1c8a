"""Table of all tasks: their source, their size, and what a client of each costs.

    python -m benchmarks.tasks              # the table of docs/evidence/tasks.md
    python -m benchmarks.tasks mnist-cnn    # only these tasks

Each task has a process of its own with one thread of torch, as a device has. It trains as the client
does, on noise of the dataset's shape, and makes the message that it would send.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

_SAMPLES, _BATCH, _STEPS = 64, 32, 10
_SKIPPED = {"quadratic"}
"""Tasks whose model has no size of its own."""


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(_measured(sys.argv[2])))
        return
    from agents.tasks import TASKS

    print("| task | paper | parameters | bytes per update | s per 10 steps of 32 | memory of a client |")
    print("|---|---|---|---|---|---|")
    for name in sys.argv[1:] or sorted(TASKS.keys() - _SKIPPED):
        command = [sys.executable, "-m", "benchmarks.tasks", "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| `{name}` | not measured: {done.stderr.strip().splitlines()[-1]} | | | | |")
            continue
        found = json.loads(done.stdout)
        print(
            f"| `{name}` | {found['paper']} | {found['parameters']:,} | {found['bytes']:,} | "
            f"{found['seconds']:.2g} | {found['memory'] / 2**20:.0f} MiB |",
            flush=True,
        )


def _measured(name: str) -> dict[str, Any]:
    import torch

    from agents.client.training import Trainer
    from agents.config import LocalTraining
    from agents.models.flat import buffers_of, initial
    from agents.shards import Shard
    from agents.tasks import TASKS
    from agents.wire import payloads
    from testbed.data.datasets import DATASETS
    from testbed.plan.costs import message_sizes

    torch.set_num_threads(1)
    task = TASKS[name]()
    source = DATASETS[str(task.dataset)]
    rng = np.random.default_rng(0)
    shape = (_SAMPLES, *(source.shape or ()))
    x = rng.integers(0, 64, shape).astype(np.int16 if source.tokens else np.uint8)
    shard = Shard(x, rng.integers(0, 2, _SAMPLES), 1.0 if source.tokens else 1 / 64)
    trainer = Trainer(task, shard, LocalTraining(steps=_STEPS, batch_size=_BATCH, lr=0.01))
    trainer.warm_up()
    module = trainer.flat.module
    start, buffers = initial(module), buffers_of(module)
    begin = time.thread_time()
    result = trainer.train(start, rng, buffers=buffers)
    seconds = time.thread_time() - begin
    model = payloads.ModelMessage(
        run="run", version=0, dispatch=1, schema="", vector=result.end - start, buffers=result.buffers
    )
    payload = payloads.encode(model)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "paper": getattr(task, "paper", "").partition(":")[0] or "none",
        "parameters": start.size,
        "bytes": message_sizes("run", "", start, buffers)[1],
        "seconds": seconds,
        "memory": peak + len(payload),  # MQTT holds a second copy
    }


if __name__ == "__main__":
    main()

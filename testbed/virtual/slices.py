"""CPU time of a training step on a whole core, and for a device that gets the CPU in slices.

During the pauses of a CPU quota, other devices fill caches and branch predictors, so that each slice
begins cold. Depending on the task, a step then takes up to 50 % longer.

The measurement creates the same conditions. The process that does the steps runs in slices as long as
those of a quota, at a share of 1/8. Two other processes train on the same core at a share of 1/5 each.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from agents import process, user_code
from agents.client.training import make_trainer
from agents.config import InitialModel, LocalTraining, Named
from agents.models.flat import initial
from agents.shards import Shard
from agents.tasks import TASKS
from agents.tasks.interface import Task
from testbed.errors import HostError
from testbed.host import programs
from testbed.host.cpus import keep_awake
from testbed.plan.agent_configs import THREAD_VARIABLES
from testbed.plan.costs import SLICED_SHARE

_OTHERS = (0.2, 0.2)
"""CPU shares of two other processes, as on a core with devices that do not train all the time."""
_SLICE = 5e-3
"""CPU seconds, as in a quota (`testbed.plan.PlannedDevice.period`)."""
_ROUNDS = 3
"""Each round measures first in slices and then on a whole core. A host may be slower for a second or
two."""
_SECONDS, _LONGEST = 0.1, 1.0
"""CPU seconds of each measurement in a round, and maximum wall seconds, unless a single step takes
longer."""
_WINDOW = 0.05
"""CPU seconds. The median of all windows is the result, so that a short disturbance has no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrial:
    """Training whose step is measured, with everything that a new process needs for it."""

    task: Named
    code: str | None
    """Folder of the user's own code."""
    shard: Shard
    local: LocalTraining
    start: InitialModel


def measure_step(work: StepTrial) -> tuple[float, float]:
    """CPU seconds of a step on a whole core of this host, and in slices at a share of `SLICED_SHARE`,
    never less. Takes some seconds. Raises HostError."""
    with keep_awake():
        done = subprocess.run(
            [*programs.tied_prefix(), *programs.command(__name__)],
            input=pickle.dumps(work),
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")},
            capture_output=True,
            check=False,
            start_new_session=True,  # so that Ctrl-C reaches only this process
        )
    if done.returncode:
        output = done.stderr.decode(errors="replace").strip()
        raise HostError(f"the time of a step could not be measured:\n{output}")
    whole, sliced = map(float, done.stdout.split()[-2:])  # own code may print something before
    return whole, max(whole, sliced)


def main() -> None:
    work: StepTrial = pickle.load(sys.stdin.buffer)  # noqa: S301  (of our own process)
    process.keep_freed_memory()
    user_code.use_folder(work.code)
    task = user_code.build(work.task, TASKS, Task)
    trainer = make_trainer(task, work.shard, work.local, work.start)
    begin = initial(trainer.flat.module)
    if sys.platform == "linux":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    def train(stopped: Callable[[], bool]) -> int:
        return trainer.train(begin, np.random.default_rng(0), stopped=stopped).steps

    # They are forked now and wait, because torch's autograd cannot be forked after it has run.
    others = [_start_stopped(partial(_train_at, share, train)) for share in _OTHERS]
    slicing = mmap.mmap(-1, 1)  # a flag shared with the slicer
    slicer = _start_stopped(partial(_stop_after_slices, os.getpid(), slicing))
    try:
        trainer.warm_up()
        gc.collect()
        gc.freeze()  # as the client does
        whole, sliced = _windows(train), list[float]()
        for _ in range(0 if task.fits else _ROUNDS):  # a `fit` may take minutes
            _signal([*others, slicer], signal.SIGCONT)
            slicing[0] = True
            sliced += _windows(train)
            slicing[0] = False
            _signal(others, signal.SIGSTOP)  # not the slicer, which may have to resume this process
            whole += _windows(train)
    finally:
        _signal([*others, slicer], signal.SIGTERM)
        _signal([*others, slicer], signal.SIGCONT)
        for pid in (*others, slicer):
            os.waitpid(pid, 0)
    sys.stdout.write(f"{median(whole)} {median(sliced or whole)}")


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for pid in processes:
        os.kill(pid, number)


def _start_stopped(work: Callable[[], object]) -> int:
    """Fork a process that is stopped until SIGCONT, and then does `work` until SIGTERM. Return its
    id."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        if sys.platform == "linux":
            programs.die_with_parent(parent)
        os.kill(os.getpid(), signal.SIGSTOP)
        work()
    return pid


def _train_at(share: float, train: Callable[[Callable[[], bool]], int]) -> None:
    """Train with pauses, so that this thread uses `share` of a core."""
    since = time.thread_time()

    def pause() -> bool:
        nonlocal since
        used = time.thread_time() - since
        if used >= _SLICE:
            time.sleep(used * (1 / share - 1))
            since = time.thread_time()
        return False

    while True:
        train(pause)


def _stop_after_slices(pid: int, slicing: mmap.mmap) -> None:
    """Stop the process after each slice, so that it gets `SLICED_SHARE` of a core, unless the byte of
    `slicing` is 0."""
    is_ending = False

    def end(*_: object) -> None:
        nonlocal is_ending
        is_ending = True

    signal.signal(signal.SIGTERM, end)
    while not is_ending:
        time.sleep(_SLICE)
        if not slicing[0]:
            continue
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_SLICE * (1 / SLICED_SHARE - 1))
        os.kill(pid, signal.SIGCONT)  # also before the end, because `pid` waits for this process
    os._exit(0)


def _windows(train: Callable[[Callable[[], bool]], int]) -> list[float]:
    """CPU seconds per step, in each of at least one window."""
    windows = list[float]()
    began, end = time.thread_time(), time.monotonic() + _LONGEST
    while not windows or (time.thread_time() - began < _SECONDS and time.monotonic() < end):
        windows.append(_window(train))
    return windows


def _window(train: Callable[[Callable[[], bool]], int]) -> float:
    steps, began = 0, time.thread_time()

    def over() -> bool:
        return time.thread_time() - began > _WINDOW

    while not over():
        steps += train(over)
    return (time.thread_time() - began) / max(1, steps)


if __name__ == "__main__":
    main()

"""What a training step costs: on a whole core, and where a device gets the CPU in slices.

A quota makes pauses, in which other devices fill caches and branch predictors with theirs, so that each
slice begins cold. How much that costs depends on the task: from nothing to half as much again. It is
measured as it will be: in a process that is stopped after slices as long as those of a quota, at a share
of an eighth, while two more train on the same core, at a fifth each.
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
from testbed.host import die_with_parent, run_module
from testbed.host.cpu_latency import keep_awake
from testbed.plan.agent_configs import THREAD_VARIABLES
from testbed.plan.costs import SLICED_SHARE

_OTHERS = (0.2, 0.2)
"""Shares of the processes beside it: a core half full of devices that do not always train."""
_SLICE = 5e-3
"""Seconds of CPU time, as of a quota (`testbed.plan.PlannedDevice.period`)."""
_ROUNDS = 3
"""In turn a whole core and slices: a host is slower for a second or two now and then."""
_SECONDS, _LONGEST = 0.1, 1.0
"""CPU time given to both in each round, and the most on the wall, but for a step."""
_WINDOW = 0.05
"""Of CPU time: the median of such windows counts, so that a short disturbance does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrial:
    """The training whose step is measured; all that a new process needs."""

    task: Named
    code: str | None
    """Folder of the task's own code."""
    shard: Shard
    local: LocalTraining
    start: InitialModel


def measured(work: StepTrial) -> tuple[float, float]:
    """Seconds of CPU time of a step: on a whole core of this host, and in slices at `SLICED_SHARE` of
    it, where it takes no less. This takes some seconds. Raises HostError."""
    with keep_awake():
        done = subprocess.run(
            [*die_with_parent.prefix(), *run_module.command(__name__)],
            input=pickle.dumps(work),
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")},
            capture_output=True,
            check=False,
            start_new_session=True,  # an interrupt is for us
        )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise HostError(f"the time of a step could not be measured:\n{said}")
    whole, sliced = map(float, done.stdout.split()[-2:])  # own code may print, too
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

    # They begin now, and wait: torch's autograd cannot fork once it has run.
    others = [_waiting(partial(_train_at, share, train)) for share in _OTHERS]
    slicing = mmap.mmap(-1, 1)  # shared with the process that does it
    slicer = _waiting(partial(_stop_after_slices, os.getpid(), slicing))
    try:
        trainer.warm_up()
        gc.collect()
        gc.freeze()  # as the client does
        whole, sliced = _windows(train), list[float]()
        for _ in range(0 if task.fits else _ROUNDS):  # a `fit` may take minutes
            _tell([*others, slicer], signal.SIGCONT)
            slicing[0] = True
            sliced += _windows(train)
            slicing[0] = False
            _tell(others, signal.SIGSTOP)  # but not the slicer, which may have stopped this process
            whole += _windows(train)
    finally:
        _tell([*others, slicer], signal.SIGTERM)
        _tell([*others, slicer], signal.SIGCONT)
        for pid in (*others, slicer):
            os.waitpid(pid, 0)
    sys.stdout.write(f"{median(whole)} {median(sliced or whole)}")


def _tell(processes: Iterable[int], number: signal.Signals) -> None:
    for pid in processes:
        os.kill(pid, number)


def _waiting(work: Callable[[], object]) -> int:
    """A process that does `work` from when it is told to go on (SIGCONT) until SIGTERM."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        if sys.platform == "linux":
            die_with_parent.ask(parent)
        os.kill(os.getpid(), signal.SIGSTOP)
        work()
    return pid


def _train_at(share: float, train: Callable[[Callable[[], bool]], int]) -> None:
    """Train, with pauses between steps such that this thread gets `share` of a core."""
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
    """While the byte of `slicing` is not 0, stop process `pid` wherever it is after each slice, so that
    it gets `SLICED_SHARE` of a core."""
    told = False

    def end(*_: object) -> None:
        nonlocal told
        told = True

    signal.signal(signal.SIGTERM, end)
    while not told:
        time.sleep(_SLICE)
        if not slicing[0]:
            continue
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_SLICE * (1 / SLICED_SHARE - 1))
        os.kill(pid, signal.SIGCONT)  # the last thing that it does: `pid` waits for its end
    os._exit(0)


def _windows(train: Callable[[Callable[[], bool]], int]) -> list[float]:
    """Seconds of CPU time of a step, by windows: at least one."""
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

"""What a training step costs: on a whole core, and where a device gets the CPU in slices.

A quota makes pauses, in which other devices fill caches and branch predictors with theirs, so that each
slice begins cold. How much that costs depends on the task: from nothing to half as much again. It is
measured as it will be: in a process that trains in slices as long as those of a quota, at a share of an
eighth, while two more do so on the same core, at a fifth each. A step that is longer than a slice is
not interrupted, so it seems to cost less than it will.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from agents import allocator, own_code
from agents.client.training import trainer_of
from agents.config import Local, Named, Start
from agents.flat import initial
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
_SECONDS, _LONGEST = 0.25, 3.0
"""CPU time given to each of both measurements, and the most on the wall, but for a step."""
_WINDOW = 0.05
"""Of CPU time: the median of such windows counts, so that a short disturbance does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The training whose step is measured; all that a new process needs."""

    task: Named
    code: str | None
    """Folder of the task's own code."""
    shard: Shard
    local: Local
    start: Start


def measured(work: Work) -> tuple[float, float]:
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
    work: Work = pickle.load(sys.stdin.buffer)  # noqa: S301  (of our own process)
    allocator.keep_freed()
    own_code.use(work.code)
    task = own_code.build(work.task, TASKS, Task)
    trainer = trainer_of(task, work.shard, work.local, work.start)
    begin = initial(trainer.flat.module)
    if sys.platform == "linux":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    def train(stopped: Callable[[], bool]) -> int:
        return trainer.train(begin, np.random.default_rng(0), stopped=stopped).steps

    others = [_other(train, share) for share in _OTHERS]  # torch's autograd cannot fork once it has run
    try:
        trainer.warm_up()
        gc.collect()
        gc.freeze()  # as the client does
        whole = _step(train, 1.0)
        for pid in others:
            os.kill(pid, signal.SIGCONT)
        sliced = whole if task.fits else _step(train, SLICED_SHARE)  # a `fit` may take minutes
    finally:
        for pid in others:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    sys.stdout.write(f"{whole} {sliced}")


def _other(train: Callable[[Callable[[], bool]], int], share: float) -> int:
    """A process that trains at `share` from when it is told to go on until it is killed."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        if sys.platform == "linux":
            die_with_parent.ask(parent)
        os.kill(os.getpid(), signal.SIGSTOP)
        pause = _Slices(share).pause
        while True:
            train(pause)
    return pid


class _Slices:
    """Makes pauses between steps, after each slice, such that this thread gets `share` of a core."""

    def __init__(self, share: float) -> None:
        self._pauses = 1 / share - 1
        self._since = time.thread_time()

    def pause(self) -> bool:
        """False: the training goes on."""
        used = time.thread_time() - self._since
        if self._pauses and used >= _SLICE:
            time.sleep(used * self._pauses)
            self._since = time.thread_time()
        return False


def _step(train: Callable[[Callable[[], bool]], int], share: float) -> float:
    """Seconds of CPU time of a step at `share` of a core."""
    slices, windows = _Slices(share), list[float]()
    began, end = time.thread_time(), time.monotonic() + _LONGEST
    while not windows or (time.thread_time() - began < _SECONDS and time.monotonic() < end):
        windows.append(_window(train, slices))
    return median(windows)


def _window(train: Callable[[Callable[[], bool]], int], slices: _Slices) -> float:
    steps, began = 0, time.thread_time()

    def over() -> bool:
        return time.thread_time() - began > _WINDOW

    while not over():
        steps += train(lambda: over() or slices.pause())
    return (time.thread_time() - began) / max(1, steps)


if __name__ == "__main__":
    main()

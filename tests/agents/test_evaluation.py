from __future__ import annotations

import functools
import os
from concurrent.futures import Future

import numpy as np
import pytest

from agents.aggregator.evaluation import Evaluation, Evaluator
from agents.tasks.quadratic import Quadratic


def test_evaluations_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the thread that applies updates, which keeps its own priority: niceness is a thread's own."""
    found: list[int] = []
    task = Quadratic(((1.0,), (3.0,)))
    niceness = functools.partial(os.getpriority, os.PRIO_PROCESS, 0)
    before = niceness()
    monkeypatch.setattr(Quadratic, "correct", lambda *_: found.append(niceness()))
    done: Future[Future[Evaluation]] = Future()
    Evaluator(task, task.shards()[0], done.set_result).submit(7, np.zeros(1, np.float32))
    evaluation = done.result(timeout=10).result()
    assert (evaluation.version, evaluation.loss) == (7, 0.5)
    assert found == [19]
    assert niceness() == before

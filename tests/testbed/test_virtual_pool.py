"""Which trainings are computed together, when, and which results are discarded. A client covers half of
the way to its center with each step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agents.client.core import Outcome
from agents.config import LocalTraining
from agents.shards import Shard
from agents.tasks.quadratic import Quadratic
from testbed.virtual.stacked_training import BatchTrainer, Job, Pool, Ticket

CENTERS = ((8.0,), (16.0,), (32.0,))


class Noted(BatchTrainer):
    """Notes how many jobs are run together."""

    def __init__(self) -> None:
        super().__init__(Quadratic(CENTERS), Shard(np.array(CENTERS, np.float32), np.zeros(3, np.int64)))
        self.sizes: list[int] = []

    def run(self, jobs: list[Job]) -> list[Outcome]:  # type: ignore[override]
        self.sizes.append(len(jobs))
        return super().run(jobs)


def _pool(*, lazily: bool = False) -> tuple[Pool, list[int]]:
    trainer = Noted()
    return Pool(trainer, lazily), trainer.sizes


def _ticket(pool: Pool, client: int, steps: int = 1, *, gradient: bool = False) -> Ticket:
    return pool.hand_in(
        Ticket(
            pool=pool,
            work=steps,
            start=np.zeros(1, np.float32),
            indices=np.array([client]),
            local=LocalTraining(steps=steps, lr=0.5),
            lr=0.5,
            steps=steps,
            rng=lambda: np.random.default_rng(0),
            gradient=gradient,
        )
    )


def _ends(*tickets: Ticket) -> list[float]:
    return [float(ticket.outcome().end[0]) for ticket in tickets]


def test_all_running_trainings_are_computed_with_the_first_requested() -> None:
    pool, together = _pool()
    first, second = _ticket(pool, 0), _ticket(pool, 1, steps=2)
    assert together == []
    assert _ends(second, first, second) == [12, 4, 12]
    assert together == [2]
    assert _ends(_ticket(pool, 2)) == [16]
    assert together == [2, 1]


def test_unstacked_trainings_are_computed_as_they_fall_due() -> None:
    """Two at once, as for two threads; nobody asks for the third before the run is over."""
    trainer = Noted()
    pool, trainer.together = Pool(trainer, lazily=False), 2
    first, second, third = (_ticket(pool, client) for client in range(3))
    first.due, second.due, third.due = 2, 3, 1
    assert _ends(second) == [8]
    assert trainer.sizes == [2]
    assert (first.result, third.result is None) == (None, False)
    assert _ends(first, third) == [4, 16]
    assert trainer.sizes == [2, 1]


def test_lazy_pool_computes_only_requested_results() -> None:
    pool, together = _pool(lazily=True)
    first, second, third = (_ticket(pool, client) for client in range(3))
    second.request_result()
    assert _ends(first) == [4]
    assert together == [2]
    assert _ends(second) == [8]
    assert together == [2]
    assert third.result is None


def test_results_are_computed_once() -> None:
    pool, together = _pool()
    first = _ticket(pool, 0)
    first.outcome()
    first.request_result()
    assert _ends(_ticket(pool, 1)) == [8]
    assert together == [1, 1]


def test_result_for_more_steps_is_discarded() -> None:
    pool, together = _pool()
    cut = _ticket(pool, 0, steps=3)
    assert _ends(cut) == [7]
    cut.shorten(3)
    assert _ends(cut) == [7]
    assert together == [1]
    cut.shorten(2)
    assert _ends(cut) == [6]
    assert together == [1, 1]


def test_zero_steps_need_no_computation() -> None:
    pool, together = _pool()
    none = _ticket(pool, 0, steps=1)
    none.shorten(0)
    other = _ticket(pool, 1, steps=0)
    assert _ends(none, other) == [0, 0]
    assert math.isnan(none.outcome().loss)
    assert together == []
    assert _ends(_ticket(pool, 2)) == [16]
    assert together == [2]  # with the one that was cut afterwards


@pytest.mark.parametrize(("gradient", "end"), [(False, 4), (True, -8)])
def test_gradient_is_not_applied_as_a_step(gradient: bool, end: float) -> None:
    pool, _ = _pool()
    outcome = _ticket(pool, 0, gradient=gradient).outcome()
    assert (outcome.end.tolist(), outcome.loss) == ([end], 32)

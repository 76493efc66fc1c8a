"""Scheduling of evaluations: evaluated versions, and skipped ones."""

from __future__ import annotations

import numpy as np
import pytest

from agents import events
from agents.aggregator.actions import Evaluate, Log
from agents.aggregator.inputs import EvaluationDone, PartEvaluated
from agents.aggregator.progress import Evaluations

_W = np.zeros(2, np.float32)


def test_last_version_is_among_the_evaluations_left_at_the_end() -> None:
    evaluations = Evaluations(several=True)
    assert evaluations.remaining(0) == 1
    evaluations.request(0, _W, at=5)
    assert evaluations.remaining(0) == 1
    assert evaluations.remaining(1) == 2
    part = evaluations.part(PartEvaluated(99, 0, "class", "3", 7, 0.5, 0.5))
    whole = evaluations.done(EvaluationDone(99, 0, 0.5, 0.5))
    assert (part.record.at, whole.record.at) == (5e-9, 5e-9)  # when the model was taken
    assert evaluations.remaining(0) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, 2e19])
def test_divergence_is_reported_once(value: float) -> None:
    evaluations = Evaluations(several=True)
    diverged = np.array([0, value], np.float32)
    told, evaluate = evaluations.request(1, diverged, at=2_000_000_000)
    assert isinstance(told, Log)
    assert isinstance(told.record, events.Note)
    assert (told.record.at, evaluate) == (2.0, Evaluate(1))
    assert told.record.message.startswith("version 1 of the model is not finite")
    assert evaluations.request(2, diverged, at=3) == [Evaluate(2)]

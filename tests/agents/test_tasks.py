from __future__ import annotations

import numpy as np
import pytest
import torch

from agents.config import Local
from agents.flat import FlatModule
from agents.tasks import TASKS
from agents.tasks.quadratic import Quadratic

CENTERS = ((1.0, -2.0), (3.0, 0.0), (5.0, 2.0))


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("cifar10-cnn", (3, 32, 32), 62_006),
        ("digits-logreg", (8, 8), 650),
        ("mnist-cnn", (28, 28), 28_938),
        ("mnist-logreg", (28, 28), 7850),
    ],
)
def test_a_classifier_scores_ten_classes(name: str, shape: tuple[int, ...], parameters: int) -> None:
    task = TASKS[name]()
    model = task.model()
    outputs = model(torch.rand(4, *shape))
    y = torch.tensor([1, 2, 3, 4])
    correct = task.correct(outputs, y)
    assert outputs.shape == (4, 10)
    assert task.loss(outputs, y).shape == (4,)
    assert correct is not None
    assert correct.shape == (4,)
    assert FlatModule(model).w.shape == (parameters,)


def test_the_quadratic_is_half_the_squared_distance_to_the_center() -> None:
    task = Quadratic(CENTERS)
    flat = FlatModule(task.model())
    assert flat.w.tolist() == [0, 0]
    flat.load(np.array([1.0, 1.0], np.float32))
    x = torch.tensor(CENTERS)
    loss = task.loss(flat.module(x), torch.zeros(3))
    assert loss.tolist() == [4.5, 2.5, 8.5]
    loss.mean().backward()  # type: ignore[no-untyped-call]
    assert flat.gradient.tolist() == [-2, 1]  # w minus the mean of the centers
    assert task.correct(flat.module(x), torch.zeros(3)) is None
    assert task.l2 == 0


def test_each_client_has_its_own_center() -> None:
    shards = Quadratic(CENTERS).shards()
    assert [shard.x.tolist() for shard in shards] == [[[1, -2]], [[3, 0]], [[5, 2]]]
    assert shards[0].x.dtype == np.float32
    assert shards[0].y.tolist() == [0]
    assert Local(epochs=2).count(len(shards[0])) == 2


def test_centers_are_of_one_dimension_and_one_per_client() -> None:
    with pytest.raises(ValueError, match=r"centers is 2 points of \[1, 2\] numbers, expected one per"):
        Quadratic(((1.0,), (1.0, 2.0)))
    with pytest.raises(ValueError, match="centers is 0 points"):
        Quadratic(())
    with pytest.raises(ValueError, match="centers is 3 points, expected one for each of the 4 devices"):
        Quadratic(CENTERS).check(4)
    Quadratic(CENTERS).check(3)


def test_a_task_with_a_dataset_brings_no_shards() -> None:
    with pytest.raises(LookupError, match="learns from the dataset digits"):
        TASKS["digits-logreg"]().shards()

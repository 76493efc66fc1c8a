"""Operations of a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.nn import functional

from agents.tasks.cnn import MnistCnn
from agents.tasks.interface import Task
from agents.tasks.logreg import DigitsLogreg
from agents.tasks.quadratic import Quadratic
from testbed.data import datasets
from testbed.data.datasets import Columns
from testbed.plan import model_check
from testbed.speed import Work
from testbed.topology.data_settings import DataSettings


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "testbed" / "work"


X = torch.rand(2, 4, 8, 8, requires_grad=True)


@pytest.mark.parametrize(
    ("run", "kind", "flop"),
    [
        (lambda: torch.mm(torch.rand(3, 5), torch.rand(5, 7)), "matrix", 2 * 3 * 5 * 7),
        (lambda: functional.conv2d(X, torch.rand(6, 4, 3, 3), padding=1), "convolution", 2 * 768 * 36),
        (lambda: functional.conv2d(X, torch.rand(4, 1, 3, 3), padding=1, groups=4), "depthwise", 9216),
        (lambda: functional.conv_transpose2d(X, torch.rand(4, 6, 3, 3)), "convolution", 2 * 512 * 54),
    ],
)
def test_operations_are_counted_by_kind(run: Callable[[], object], kind: str, flop: int) -> None:
    found = model_check.count_work(run)
    for each in ("matrix", "convolution", "depthwise"):
        assert getattr(found, each) == pytest.approx(flop / 1e9 if each == kind else 0.0)


def test_backward_pass_of_groups_costs_twice_the_forward_pass() -> None:
    weight = torch.rand(4, 1, 3, 3, requires_grad=True)
    forward = model_check.count_work(lambda: functional.conv2d(X, weight, padding=1, groups=4))
    out = functional.conv2d(X, weight, padding=1, groups=4)
    backward = model_check.count_work(
        lambda: torch.autograd.grad(out, (X, weight), torch.ones_like(out))
    )
    assert backward.depthwise == pytest.approx(2 * forward.depthwise)


def test_memory_counts_bytes_of_other_operations() -> None:
    x = torch.rand(1000)
    assert model_check.count_work(lambda: x + x).memory == pytest.approx(3 * 4000 / 1e9)
    assert model_check.count_work(lambda: x.view(10, 100).t()).memory == 0


def test_step_counts_forward_and_backward() -> None:
    found = model_check.count_step_work(MnistCnn(), 32)
    assert found is not None
    first, second = 28 * 28 * 16 * 25, 14 * 14 * 32 * 16 * 25
    assert found.convolution == pytest.approx(2 * 32 * (2 * first + 3 * second) / 1e9)
    assert found.matrix == pytest.approx(2 * 32 * 3 * 1568 * 10 / 1e9)
    assert found.depthwise == 0
    assert found.memory > 0


def test_frozen_layers_need_no_gradient() -> None:
    """Nothing goes back through the first convolution, so nor does it to the input of the second."""
    found = model_check.count_step_work(MnistCnn(), 32, ["1.*"])
    assert found is not None
    first, second = 28 * 28 * 16 * 25, 14 * 14 * 32 * 16 * 25
    assert found.convolution == pytest.approx(2 * 32 * (first + 2 * second) / 1e9)
    whole = model_check.count_step_work(MnistCnn(), 32)
    assert whole is not None
    assert whole.memory > found.memory


def test_step_is_counted_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model_check.count_step_work(DigitsLogreg(), 8)
    assert first is not None
    larger = model_check.count_step_work(DigitsLogreg(), 16)
    assert larger is not None
    assert larger.matrix == pytest.approx(2 * first.matrix)
    other = Work(convolution=1, depthwise=1, matrix=1, memory=1)
    monkeypatch.setattr(model_check, "_count_step", lambda task, batch_size, frozen: other)
    assert model_check.count_step_work(DigitsLogreg(), 8) == first
    assert model_check.count_step_work(DigitsLogreg(bias=False), 8) == other  # another step
    for kept in cache.iterdir():
        kept.write_text("{torn")
    assert model_check.count_step_work(DigitsLogreg(), 8) == other


def test_task_may_supply_its_data() -> None:
    found = model_check.count_step_work(Quadratic(centers=((0.0, 1.0), (2.0, 3.0))), 32)
    assert found is not None
    assert found.memory > 0


def test_counting_does_not_change_the_runs_random_numbers() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    model_check.count_step_work(MnistCnn(), 4)
    assert torch.equal(torch.rand(3), expected)


@dataclass(frozen=True)
class Foreign(Task):
    dataset: ClassVar[str | None] = "foreign"
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 2)


@pytest.mark.parametrize("shape", [None, (5,)])
def test_step_that_cannot_run_has_no_count(
    shape: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = Columns(DataSettings(hub="a/b", input=("img",), label="label"), shape=shape)
    monkeypatch.setitem(datasets.DATASETS, "foreign", foreign)
    assert model_check.count_step_work(Foreign(), 4) is None


def test_any_failure_of_a_task_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(task: Task) -> torch.nn.Module:
        raise AttributeError("my own mistake")

    monkeypatch.setattr(Foreign, "model", fail)
    assert model_check.count_step_work(Foreign(), 4) is None

from __future__ import annotations

import sys
from typing import Any, Literal

import numpy as np
import pytest
import torch

from agents.config import LocalTraining
from agents.models.flat import FlatModule, learned, stored_buffers
from agents.tasks import TASKS
from agents.tasks.bert import Sst2BertLora
from agents.tasks.logreg import MnistLogreg
from agents.tasks.quadratic import Quadratic
from agents.tasks.resnet import Cifar10ResNet18

CENTERS = ((1.0, -2.0), (3.0, 0.0), (5.0, 2.0))


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("cifar10-cnn", (3, 32, 32), 62_006),
        ("cifar10-cnn-defedavg", (3, 32, 32), 878_538),
        ("cifar10-cnn-mcmahan", (3, 32, 32), 1_068_298),
        ("cifar10-cnn-small", (3, 32, 32), 11_642),
        ("cifar10-resnet18", (3, 32, 32), 11_173_962),
        ("fashion-mnist-cnn", (28, 28), 582_026),
        ("digits-logreg", (8, 8), 650),
        ("mnist-cnn", (28, 28), 28_938),
        ("mnist-logreg", (28, 28), 7850),
        ("mnist-mlp", (28, 28), 50_890),
    ],
)
def test_a_classifier_scores_ten_classes(name: str, shape: tuple[int, ...], parameters: int) -> None:
    """On torch's `meta` device, too, which like a GPU takes no tensor of the CPU."""
    task = TASKS[name]()
    model = task.model()
    assert FlatModule(model).w.shape == (parameters,)
    for device in ("cpu", "meta"):
        outputs = model.to(device)(torch.rand(4, *shape, device=device))
        y = torch.tensor([1, 2, 3, 4], device=device)
        loss, correct = task.loss(outputs, y), task.correct(outputs, y)
        assert correct is not None
        assert (outputs.shape, loss.shape, correct.shape) == ((4, 10), (4,), (4,))
        assert correct.device.type == device
    loss.mean().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.is_meta for _, p in learned(model))


def test_images_are_scaled_as_the_task_says() -> None:
    x, weights = torch.rand(3, 28, 28), torch.rand(10, 784)
    for scaling, mean, deviation in (
        ("unit", 0, 1),
        ("signed", 0.5, 0.5),
        ("standardised", 0.1307, 0.3081),
    ):
        model = MnistLogreg(bias=False, scaling=scaling).model()  # type: ignore[arg-type]
        ((_, weight),) = learned(model)
        weight.data.copy_(weights)
        torch.testing.assert_close(model(x), ((x - mean) / deviation).flatten(1) @ weights.T)


def test_models_have_the_sizes_in_their_papers() -> None:
    """DeFedAvg's for CIFAR-10 has 3.53 MB, McMahan's "about 10^6" parameters, ResNet-18 11.2 million."""
    assert 4 * _learned("cifar10-cnn-defedavg") == pytest.approx(3.53e6, rel=0.01)
    assert _learned("cifar10-cnn-mcmahan") == pytest.approx(1e6, rel=0.1)
    norms: tuple[tuple[Literal["batch", "group"], int], ...] = (("batch", 2 * 4800 + 20), ("group", 0))
    for norm, statistics in norms:
        assert _learned("cifar10-resnet18", norm=norm) == pytest.approx(11.2e6, rel=0.01)
        module = Cifar10ResNet18(norm).model()
        assert sum(b.numel() for _, b in stored_buffers(module)) == statistics


def test_shakespeare_models_predict_one_of_80_characters() -> None:
    for name in ("shakespeare-lstm", "shakespeare-mlp"):
        assert TASKS[name]().model()(torch.randint(0, 80, (3, 80))).shape == (3, 80)
    assert _learned("shakespeare-lstm") == 80 * 8 + 4 * 100 * (108 + 2) + 4 * 100 * (200 + 2) + 101 * 80
    assert _learned("shakespeare-mlp") == 80 * 16 + (10 * 16 + 1) * 100 + 101 * 80


def test_shakespeare_mlp_looks_at_the_last_10_characters_alone() -> None:
    model = TASKS["shakespeare-mlp"]().model()
    x = torch.randint(1, 80, (3, 80))
    before, last = x.clone(), x.clone()
    before[:, :-10] = 0
    last[:, -10] = 0
    assert torch.equal(model(before), model(x))
    assert not torch.equal(model(last), model(x))


@pytest.mark.parametrize(
    ("task", "parameters"),
    [
        ({"name": "sent140-tinybert"}, 45_090),
        ({"name": "sent140-tinybert", "size": "tiny"}, 4_386_178),  # BERT-Tiny: 4.4 million
        ({"name": "sst2-bert-lora"}, 2 * 4 * 32 + 2 * 33),
        # 12 layers, queries and values, 768 + 768 each; and the head.
        ({"name": "sst2-bert-lora", "size": "base"}, 12 * 2 * 2 * 768 + 2 * 769),
        ({"name": "sst2-bert-lora", "size": "base", "rank": 4}, 4 * 12 * 2 * 2 * 768 + 2 * 769),
    ],
    ids=str,
)
def test_only_adapters_and_head_of_bert_are_sent(task: dict[str, Any], parameters: int) -> None:
    pytest.importorskip("peft")
    name = task.pop("name")
    assert _learned(name, **task) == parameters
    if "size" not in task:
        first, second = (TASKS[name]().model() for _ in range(2))
        assert first(torch.tensor([[5, 40, 0, 0]])).shape == (1, 2)
        # What does not travel is the same everywhere.
        frozen = {n: p for n, p in second.named_parameters() if not p.requires_grad}
        assert all(torch.equal(p, frozen[n]) for n, p in first.named_parameters() if n in frozen)


def _learned(task: str, **parameters: Any) -> int:
    with torch.device("meta" if "bert" in task else "cpu"):  # BERT-base has 440 MB
        return sum(p.numel() for _, p in learned(TASKS[task](**parameters).model()))


def test_without_its_libraries_bert_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers.*edge-fl-testbed\[bert\].*requirements:"):
        TASKS["sent140-tinybert"]().model()
    with pytest.raises(ValueError, match="rank is 0"):
        Sst2BertLora(rank=0)


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


def test_quadratic_gives_each_client_its_own_center() -> None:
    shards = Quadratic(CENTERS).shards()
    assert [shard.x.tolist() for shard in shards] == [[[1, -2]], [[3, 0]], [[5, 2]]]
    assert shards[0].x.dtype == np.float32
    assert shards[0].y.tolist() == [0]
    assert LocalTraining(epochs=2).count(len(shards[0])) == 2


def test_centers_must_have_one_dimension_and_one_per_client() -> None:
    with pytest.raises(ValueError, match=r"centers has 2 points of \[1, 2\] numbers"):
        Quadratic(((1.0,), (1.0, 2.0)))
    with pytest.raises(ValueError, match="centers has 0 points"):
        Quadratic(())
    with pytest.raises(ValueError, match="centers has 3 points"):
        Quadratic(CENTERS).check(4)
    Quadratic(CENTERS).check(3)


def test_task_with_a_dataset_has_no_shards() -> None:
    with pytest.raises(LookupError, match="learns from the dataset digits"):
        TASKS["digits-logreg"]().shards()

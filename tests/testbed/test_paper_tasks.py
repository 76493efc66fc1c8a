"""Each task of a paper learns: its loss falls in virtual time, on real data where there is some.

The real data has its known shapes. It is decoded once per machine.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testbed.data import datasets
from testbed.data.datasets import DATASETS
from tests.testbed.test_virtual_run import _run, _topology

PLENTY: dict[str, dict[str, Any]] = {
    "cifar10-cnn-defedavg": {"steps": 15, "lr": 0.01},
    "cifar10-cnn-mcmahan": {"steps": 20, "lr": 0.02},
    "cifar10-resnet18": {"steps": 3, "batch_size": 8, "lr": 0.01, "momentum": 0.0},
    "fashion-mnist-cnn": {},
    "sent140-tinybert": {"steps": 40},
    "shakespeare-lstm": {"lr": 0.5},
    "sst2-bert-lora": {"steps": 40, "lr": 0.2},
}
"""Settings of local training on 16 samples, so that two rounds are enough (of a small BERT, three)."""


@pytest.mark.parametrize("task", PLENTY)
def test_loss_of_a_paper_task_decreases(
    task: str, tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "bert" in task and importlib.util.find_spec("peft") is None:
        pytest.skip("transformers and peft are not installed: pip install 'edge-fl-testbed[bert]'")
    if task == "fashion-mnist-cnn":  # of which the data root has none: MNIST has the same shape
        monkeypatch.setitem(DATASETS, "zalando-datasets/fashion_mnist", DATASETS["ylecun/mnist"])
    natural = task == "shakespeare-lstm"
    topology = _topology(
        tmp_path,
        task={
            "name": task,
            "partition": {"scheme": "natural"} if natural else {"scheme": "resampled", "samples": 16},
            "local": {"steps": 10, "batch_size": 16, "lr": 0.05, "momentum": 0.9, **PLENTY[task]},
        },
        rule={"name": "fedavg"},
        devices=[{"name": "d", "count": 2, "timing": "1s"}],
        evaluate={"every": "1min", "samples": 10},
        stop={"updates": 6 if task == "sent140-tinybert" else 4},
    )
    losses = _run(topology, tmp_path, data=data_root).updates["loss"]
    assert losses.iloc[-2:].mean() < 0.95 * losses.iloc[:2].mean()


def test_mnist_has_its_known_shapes(data_root: Path) -> None:
    mnist = datasets.load("ylecun/mnist", data_root)
    assert mnist.train.x.shape == (60_000, 28, 28)
    assert mnist.test.x.shape == (10_000, 28, 28)
    assert np.bincount(mnist.test.y).tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
    ]  # fmt: skip
    assert mnist.train.x.mean() / 255 == pytest.approx(0.1307, abs=1e-4)  # the known mean of MNIST


def test_cifar10_has_its_known_shapes(data_root: Path) -> None:
    cifar = datasets.load("uoft-cs/cifar10", data_root)
    assert cifar.train.x.shape == (50_000, 3, 32, 32)
    assert np.bincount(cifar.train.y).tolist() == 10 * [5000]
    assert np.bincount(cifar.test.y).tolist() == 10 * [1000]
    means = cifar.train.x[::10].mean(axis=(0, 2, 3)) / 255
    assert means == pytest.approx([0.491, 0.482, 0.447], abs=5e-3)  # known, of red, green and blue

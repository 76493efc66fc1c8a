"""Each task of a paper learns: its loss falls in virtual time, on real data where there is some."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

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
"""Settings of local training on 16 samples, so that two rounds are enough."""


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
        stop={"updates": 6},
    )
    losses = _run(topology, tmp_path, data=data_root).updates["loss"]
    assert losses.iloc[-2:].mean() < 0.95 * losses.iloc[:2].mean()

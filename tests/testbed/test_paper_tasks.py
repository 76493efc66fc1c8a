"""Each task of a paper learns: its loss falls in virtual time, on real data where there is some."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from testbed.plan.datasets import DATASETS
from tests.testbed.test_virtual_run import _run, _topology

PLENTY: dict[str, dict[str, Any]] = {
    "cifar10-cnn-defedavg": {"steps": 12, "lr": 0.05},
    "cifar10-cnn-mcmahan": {"steps": 16, "lr": 0.1},
    "cifar10-resnet18": {"steps": 4, "batch_size": 16, "lr": 0.05},
    "fashion-mnist-cnn": {"steps": 8, "lr": 0.05},
    "sent140-tinybert": {"steps": 40, "lr": 0.3},
    "shakespeare-lstm": {"steps": 12, "lr": 1.0},
    "sst2-bert-lora": {"steps": 40, "lr": 0.5},
}
"""Of local training, so that a few updates are enough."""


@pytest.mark.parametrize("task", PLENTY)
def test_its_loss_falls(
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
            "partition": {"scheme": "natural"} if natural else {"scheme": "resampled", "samples": 256},
            "local": {"batch_size": 32, **PLENTY[task]},
        },
        rule={"name": "fedavg"},
        devices=[{"name": "d", "count": 2, "timing": "1s"}],
        evaluate={"every": "1min", "samples": 200},
        stop={"updates": 6},
    )
    evaluations = _run(topology, tmp_path, data=data_root).evaluations
    assert evaluations["loss"].iloc[-1] < 0.97 * evaluations["loss"].iloc[0]

"""Flower's own examples and baselines as clients, unchanged: what each does here.

    python -m benchmarks.flower_apps CHECKOUT DATA

CHECKOUT is a checkout of github.com/adap/flower. DATA is a folder with datasets, as for TESTBED_DATA.
Each app is copied beside a topology with two devices, and runs in virtual time. If no function without
arguments makes its initial model, a module `start` of ours does. Datasets are cut to 400 samples; those
that DATA lacks are made up, with the same columns. The output is the table of docs/evidence/flower.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq

import testbed
from testbed.api.topology_input import text_of

_SAMPLES = 400
_UPDATES = 6
_ADULT = (
    *("age", "workclass", "fnlwgt", "education", "education.num", "marital.status", "occupation"),
    *("relationship", "race", "sex", "capital.gain", "capital.loss", "hours.per.week", "native.country"),
)
_TRANSFORMS = """
import numpy as np
import torch

def ToTensor():
    def apply(image):
        pixels = torch.tensor(np.asarray(image) / 255).float()
        return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    return apply

def Normalize(mean, std):
    return lambda image: (image - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

def Compose(steps):
    def apply(image):
        for step in steps:
            image = step(image)
        return image
    return apply
"""
"""Stand-ins for the transforms of torchvision that the apps import, where torchvision is missing."""


@dataclass(frozen=True, slots=True)
class App:
    """An app of Flower's repository."""

    folder: str
    """Path of its project in the repository."""
    package: str
    data: str | None = None
    """Dataset that it downloads, by its name on the hub; None if there is none."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the task, beside `app`."""
    start: str = ""
    """Text of a module `start` with a function `net`; empty if there is none."""


APPS = (
    App(
        "examples/quickstart-pytorch", "pytorchexample", "uoft-cs/cifar10",
        {"net": "pytorchexample.task:Net"},
    ),
    App(
        "examples/quickstart-sklearn", "sklearnexample", "hitorilabs/iris", {"net": "start:net"},
        "import numpy as np\ndef net():\n    return [np.zeros((3, 4)), np.zeros(3)]\n",
    ),
    App(
        "examples/quickstart-numpy", "quickstart_numpy", None,
        {"net": "quickstart_numpy.task:get_dummy_model"},
    ),
    App("examples/quickstart-pandas", "pandas_example", "scikit-learn/iris"),
    App(
        "examples/fl-tabular", "fltabular", "scikit-learn/adult-census-income",
        {"net": "fltabular.task:IncomeClassifier"},
    ),
    App(
        "examples/custom-mods", "custom_mods", "uoft-cs/cifar10", {"net": "custom_mods.task:Net"}
    ),
    App(
        "examples/flower-secure-aggregation", "secaggexample", "uoft-cs/cifar10",
        {"net": "secaggexample.task:make_net"},
    ),
    App("examples/fl-dp-sa", "fl_dp_sa", "ylecun/mnist", {"net": "fl_dp_sa.task:Net"}),
    App(
        "examples/federated-vae", "fedvaeexample", "uoft-cs/cifar10",
        {"net": "fedvaeexample.task:Net"},
    ),
    App(
        "baselines/fedprox", "fedprox", "ylecun/mnist",
        {"net": "start:net", "partitions": 10, "run_config": "algorithm.local-epochs=2"},
        "from fedprox.model import LogisticRegression\n"
        "def net():\n    return LogisticRegression(10)\n",
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Run Flower's own apps as clients.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", help="one app, by the last part of its folder")
    options = parser.parse_args()
    print("| app | what it does here |\n|---|---|")
    for app in APPS:
        if options.only in (None, Path(app.folder).name):
            with tempfile.TemporaryDirectory() as folder:
                told = outcome(app, options.checkout, options.data, Path(folder))
            print(f"| {app.folder} | {told} |", flush=True)


def outcome(app: App, checkout: Path, data: Path, folder: Path) -> str:
    """Run `app` in `folder`; say what came of it."""
    project = folder / "project"
    shutil.copytree(checkout / app.folder / app.package, project / app.package)
    shutil.copy(checkout / app.folder / "pyproject.toml", project)
    if app.start:
        (project / "start.py").write_text(app.start)
    if importlib.util.find_spec("torchvision") is None:
        (project / "torchvision").mkdir()
        (project / "torchvision" / "__init__.py").touch()
        (project / "torchvision" / "transforms.py").write_text(_TRANSFORMS)
    if app.data is not None:
        _write(app.data, data, folder)
    topology = {
        "name": "flower-app",
        "code": "project",
        "task": {
            "name": "flower",
            "app": f"{app.package}.client_app:app",
            "local": {"steps": 1, "lr": 0.05},
            **app.task,
        },
        "rule": {"name": "fedasync", "mixing": 0.6},
        "devices": [{"name": "d", "count": 2, "cpu": 0.3}],
        "evaluate": {"every": "1s"},
        "stop": {"updates": _UPDATES},
    }
    (folder / "t.yaml").write_text(f"{text_of(topology).text}\nvirtual: {{step_time: 1s}}\n")
    command = [sys.executable, "-m", "testbed", "up", "t.yaml", "--runtime", "virtual"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return f"refused (exit code {done.returncode}): {' '.join(lines)[-600:]}"
    (path,) = (folder / "runs").iterdir()
    run = testbed.load(path)
    figures = run.evaluations[["loss", "accuracy"]].iloc[[0, -1]].to_numpy()
    told = ", ".join(
        f"{name} {first:.3g} to {last:.3g}"
        for name, first, last in zip(("loss", "accuracy"), *figures, strict=True)
        if not np.isnan(first)
    )
    return f"works: {len(run.updates)} updates, {told or 'no loss and no accuracy reported'}"


def _write(name: str, data: Path, folder: Path) -> None:
    """Write `_SAMPLES` samples of the dataset `name` where `datasets` finds it by this name."""
    to = folder / name
    to.mkdir(parents=True)
    if (data / name).is_dir():
        for split in ("train", "test"):
            for file in (data / name).glob(f"{split}-*.parquet"):
                pq.write_table(pq.read_table(file).slice(0, _SAMPLES), to / f"{split}.parquet")
        return
    rows = _MADE_UP[name]()
    datasets.Dataset.from_dict(rows).to_parquet(to / "train.parquet")


def _iris(names: Mapping[str, int], label: str) -> dict[str, list[Any]]:
    from sklearn.datasets import load_iris

    x, y = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    columns = {name: x[order, column].tolist() for name, column in names.items()}
    return {**columns, label: y[order].tolist()}


def _adult() -> dict[str, list[Any]]:
    draws = np.random.default_rng(0)
    ages = draws.integers(18, 80, _SAMPLES)
    rows = {
        name: draws.integers(0, 9, _SAMPLES).tolist()
        if name in ("fnlwgt", "education.num", "capital.gain", "capital.loss", "hours.per.week")
        else [f"{name}-{k}" for k in draws.integers(0, 4, _SAMPLES)]
        for name in _ADULT
    }
    rows["age"] = ages.tolist()
    return {**rows, "income": [">50K" if age > 45 else "<=50K" for age in ages]}


_MADE_UP: dict[str, Callable[[], dict[str, list[Any]]]] = {
    "hitorilabs/iris": lambda: _iris(
        {"sepal_length": 0, "sepal_width": 1, "petal_length": 2, "petal_width": 3}, "species"
    ),
    "scikit-learn/iris": lambda: _iris({"SepalLengthCm": 0, "SepalWidthCm": 1}, "Species"),
    "scikit-learn/adult-census-income": _adult,
}


if __name__ == "__main__":
    main()

"""Every method of an own task that a run calls is tried before the start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from agents import user_code
from agents.shards import Shard
from testbed import simulate, topology
from testbed.data.preparation import Prepared
from testbed.errors import BadInputError
from testbed.plan import model_check
from testbed.run import preparing
from testbed.run.options import Options
from tests.running import TOPOLOGIES, Finished, Testbed

HEAD = """
from __future__ import annotations
import math
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
import torch
from torch import nn
from agents.tasks.interface import Task

class Line(Task):
    def dataset(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(200, 3))
        return {"train": {"x": x, "y": x @ [1.0, -2.0, 0.5] + 3}}
    def model(self):
        return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    def loss(self, outputs, y):
        return (outputs - y).square()

@dataclass(frozen=True)
class Mine(Line):
"""
UNSCORED = "    has_accuracy: ClassVar[bool] = False\n"
PIXELS = np.ones((40, 3), np.uint8)
FITS = UNSCORED + "    fits: ClassVar[bool] = True\n    def fit(self, module, shard, lr):\n"


@pytest.fixture(autouse=True)
def nothing_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    user_code.use_folder(None)


def write(folder: Path, body: str, local: str = "{steps: 1, lr: 0.1}", name: str = "Mine") -> Path:
    """Return a topology whose task is the class `name` of a module. `Mine` has the class body `body`."""
    (folder / "own.py").write_text(HEAD + body)
    file = folder / "t.yaml"
    file.write_text(
        yaml.safe_dump({"name": "t", "code": "own.py"})
        + f'task:\n  name: "own:{name}"\n  local: {local}\n'
        + "rule: {name: fedavg}\n"
        + "devices: [{name: a, count: 2, timing: 1s}]\nstop: {updates: 40}\nvirtual: {step_time: 1ms}\n"
    )
    return file


def halves(shard: Shard) -> Prepared:
    """Return data of which each of two devices has half."""
    parts = np.array_split(np.arange(len(shard)), 2)
    return Prepared(shard, shard, dict(zip(("a-1", "a-2"), parts, strict=True)))


def test_task_without_accuracy_needs_no_correct(tmp_path: Path) -> None:
    done = simulate(write(tmp_path, UNSCORED, "{steps: 5, lr: 0.1}"), runs=tmp_path / "runs")
    assert done.evaluations["loss"].iloc[-1] < 0.01 < done.evaluations["loss"].iloc[0]
    assert done.evaluations["accuracy"].isna().all()


def test_regression_example_learns(tmp_path: Path) -> None:
    done = simulate(TOPOLOGIES / "own/regression.yaml", runs=tmp_path)
    first, *_, last = done.evaluations["loss"]
    assert (first > 2.5, last < 0.5, len(done.updates)) == (True, True, 200)


REFUSED = [
    (
        "    pass\n",
        "t.yaml:4:9: task.name: own:Refused0 cannot run: its model returns outputs of shape (40,)",
    ),
    (
        "    def correct(self, outputs, y): return 0.5\n",
        "its correct is 0.5, expected one value per sample",
    ),
    (
        "    def model(self): return nn.Linear(3, 2)\n"
        "    def loss(self, outputs, y): return outputs.sum(1) - y\n",
        "its labels are float32, not integer classes: define correct, or has_accuracy: ClassVar[bool] =",
    ),
    (
        UNSCORED + "    def loss(self, outputs, y): return 0.0\n",
        "its loss is 0.0, expected one value for",
    ),
    (
        UNSCORED + "    def weights(self, y): return [1.0]\n",
        "its weights is [1.0], expected the shape of",
    ),
    (UNSCORED + "    l2 = '1'\n", "its l2 is '1', expected a number"),
    (
        UNSCORED + "    def model(self): return [nn.Linear(3, 1)]\n",
        "its model returns a list, expected a ",
    ),
    (
        UNSCORED + "    def model(self): pass\n",
        "own:Refused7 cannot run: its model returns None, expected",
    ),
    (UNSCORED + "    fits: ClassVar[bool] = True\n", "fits = True without a method fit: define it"),
    (
        UNSCORED + "    def fit(self, module, shard, lr): pass\n",
        "has fits = False and a method fit: write",
    ),
    (
        FITS + "        pass\n",
        "t.yaml:4:9: task.name: own:Refused10 cannot run: Refused10.fit returned None",
    ),
    (
        FITS + "        module[0].weight.data = torch.zeros(1, 3)\n        return 0.0\n",
        "its fit gives the parameter 0.weight a new tensor, so that the training would be lost",
    ),
    (
        FITS + "        return module(torch.from_numpy(shard.x)).sum()\n",
        "in fit\n    return module(torch.",
    ),
    (FITS + "        return undefined\n", "NameError: name 'undefined' is not defined"),
    (
        FITS.replace("lr):", "lr, client):") + "        client.memory['n'] = 1\n        return 0.0\n",
        "fit keeps memory['n'] = 1, expected a NumPy array",
    ),
    (
        UNSCORED + "    def weights(self, y): return -torch.ones(len(y))\n",
        "its weights has -1, expected numbers of at least 0",
    ),
]
"""Bodies of task classes, and part of the message with which each is refused."""
ACCEPTED = [
    FITS + "        x, y = shard.tensors()\n        return self.loss(module(x), y).mean()\n",
    FITS + "        return math.nan\n",
    UNSCORED,
    "    def correct(self, outputs, y): return (outputs - y).abs() < 0.5\n",
]
CLASSES = "".join(
    f"\n@dataclass(frozen=True)\nclass {name}{number}(Line):\n{body}"
    for name, bodies in (("Refused", [body for body, _ in REFUSED]), ("Accepted", ACCEPTED))
    for number, body in enumerate(bodies)
)
"""All classes are in one module, so that one process looks at all of them."""


def refusal(folder: Path, name: str) -> str:
    """Return the message with which the task `name` is refused; empty if it is accepted."""
    y = np.linspace(0, 1, 40, dtype=np.float32)
    try:
        read = topology.load(write(folder, UNSCORED + CLASSES, name=name))
        preparing.plan_topology(read, Options(runtime="virtual"))
        model_check.try_step(read, halves(Shard(PIXELS, y, scale=1 / 255)))
    except BadInputError as error:
        return str(error)
    return ""


def test_method_that_cannot_work_is_refused(tmp_path: Path) -> None:
    for number, (body, told) in enumerate(REFUSED):
        refused = refusal(tmp_path, f"Refused{number}")
        assert told in refused, body
        assert "inspection_process.py" not in refused


def test_method_that_works_is_accepted(tmp_path: Path) -> None:
    for number, body in enumerate(ACCEPTED):
        assert refusal(tmp_path, f"Accepted{number}") == "", body


def test_long_fit_is_tried_for_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from testbed.user_code import inspection_process

    monkeypatch.setattr(inspection_process, "_FIT_S", 0.1)
    shard = Shard(np.ones((4, 3), np.float32), np.ones(4, np.float32))
    write(tmp_path, FITS + "        while True: pass\n")
    user_code.use_folder(str(tmp_path))
    task = user_code.load_attribute("own:Mine")()
    inspection_process._try_fit(task, shard, "a-1", 0, 0.1)


def test_compiled_model_runs_without_compilation(testbed: Testbed, tmp_path: Path) -> None:
    """The state dict has plain names, so that PyTorch loads it without `torch.compile`."""
    body = UNSCORED + "    def model(self): return torch.compile(super().model())\n"
    file = write(tmp_path, body)
    planned = testbed("plan", file, "--runtime", "virtual")
    assert "torch.compile has no effect here" in planned.out
    done = testbed("up", file, "--runtime", "virtual", "--runs", tmp_path / "runs")
    assert done.code == 0, done.err
    (run,) = (tmp_path / "runs").iterdir()
    exported = testbed("export", run, "--model", "--to", tmp_path / "model.pt")
    assert exported.code == 0, exported.err
    assert list(torch.load(tmp_path / "model.pt", weights_only=True)) == ["0.weight", "0.bias"]


NORMED = (
    UNSCORED
    + "    def model(self):\n"
    + "        layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Flatten(0)\n"
    + "        return nn.Sequential(*layers)\n"
)


def assert_refusal(read: topology.Topology, prepared: Prepared, told: str) -> None:
    """The run is refused with the message `told`; with an empty one it is accepted."""
    with pytest.raises(BadInputError) if told else nullcontext() as refused:
        model_check.try_step(read, prepared)
    assert refused is None or told in str(refused.value)


@pytest.mark.parametrize(
    ("local", "told"),
    [
        ("{epochs: 1, batch_size: 6}", ""),
        (
            "{epochs: 1, batch_size: 19}",
            "it has 20 samples, and batch_size is 19. Write last_batch: drop",
        ),
        ("{steps: 1, batch_size: 19}", ""),  # the second mini-batch is not used
        ("{epochs: 1, batch_size: 19, last_batch: drop}", ""),
        ("{epochs: 1, batch_size: 19, last_batch: merge}", ""),
        ("{steps: 1, batch_size: 1}", "batch_size is 1. Raise batch_size"),
    ],
)
def test_mini_batch_of_one_sample_is_refused_for_batch_norm(
    local: str, told: str, tmp_path: Path
) -> None:
    read = topology.load(write(tmp_path, NORMED, local))
    prepared = halves(Shard(np.ones((40, 3), np.float32), np.ones(40, np.float32)))
    assert_refusal(read, prepared, told)


@pytest.mark.parametrize(
    ("last_batch", "told"),
    [
        (
            "keep",
            "of a-1 has only one: it has 1 sample, and batch_size is 19. Write last_batch: drop, wi",
        ),
        ("merge", "Write last_batch: drop, with which the device waits and does not train"),
        ("drop", ""),
    ],
)
def test_device_with_one_sample_is_handled_as_last_batch_says(
    last_batch: str, told: str, tmp_path: Path
) -> None:
    local = f"{{epochs: 1, batch_size: 19, last_batch: {last_batch}}}"
    read = topology.load(write(tmp_path, NORMED, local))
    shard = Shard(np.ones((39, 3), np.float32), np.ones(39, np.float32))
    prepared = Prepared(shard, shard, {"a-1": np.arange(1), "a-2": np.arange(1, 39)})
    assert read.idle_devices({"a-1": 1, "a-2": 38}) == (["a-1"] if last_batch == "drop" else [])
    assert_refusal(read, prepared, told)


@pytest.mark.parametrize("runtime", ["virtual", "process"])
def test_fit_knows_its_client_and_remembers(runtime: str, testbed: Testbed, tmp_path: Path) -> None:
    """Each client counts its trainings in its memory: the loss of the k-th is 10 · index + k."""
    body = FITS.replace("lr):", "lr, client):") + (
        "        assert client.name == f'a-{client.index + 1}'\n"
        "        count = client.memory.setdefault('count', np.zeros(1, np.float32))\n"
        "        count += 1\n"
        "        return 10 * client.index + count[0]\n"
    )
    file = write(tmp_path, body)
    text = file.read_text().replace("timing: 1s", "cpu: 0.1")
    file.write_text(text.replace("updates: 40", "updates: 6"))
    done = testbed("up", file, "--runtime", runtime, "--runs", tmp_path / "runs")
    assert done.code == 0, done.out + done.err
    updates = Finished.only_one_in(tmp_path / "runs").updates
    losses = {name: [u.loss for u in updates if u.client == name] for name in ("a-1", "a-2")}
    assert losses == {"a-1": [1, 2, 3], "a-2": [11, 12, 13]}


def test_memory_of_fit_survives_a_crash_of_the_device(tmp_path: Path) -> None:
    """A crash during the third training leaves the memory as it was after the second."""
    body = FITS.replace("lr):", "lr, client):") + (
        "        count = client.memory.get('count', np.zeros(1, np.float32))\n"
        "        client.memory['count'] = count + 1\n"
        "        return count[0] + 1\n"
    )
    file = write(tmp_path, body)
    more = "scenario: [{at: 2.5s, crash: a-1, restart_after: 1s}]\n"
    file.write_text(
        file.read_text().replace("fedavg", "fedasync").replace("updates: 40", "after: 8s") + more
    )
    done = simulate(file, runs=tmp_path / "runs").updates
    losses = {name: own["loss"].tolist() for name, own in done.groupby("client", observed=True)}
    assert losses["a-1"] == [1, 2, 3, 4, 5, 6]
    assert losses["a-2"] == [1, 2, 3, 4, 5, 6, 7, 8]

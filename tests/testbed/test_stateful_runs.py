"""Whole runs, most in virtual time, of models with and without buffers, against plain PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from agents.client.training import Trainer
from agents.config import LocalTraining
from agents.models.flat import buffers_of, initial
from agents.models.vectors import Buffers, Vector
from agents.shards import Shard
from agents.tasks import TASKS
from agents.tasks.interface import Task
from agents.wire import payloads
from analysis.load import Run
from testbed.fleets.settings import WrittenTopology
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology
from tests.running import Finished, cli
from tests.testbed.test_virtual_run import _run, _topology

SEED = 11
ROUNDS = 20
LR = 0.1


@dataclass(frozen=True)
class Images(Task):
    """A small CNN on noise with a pattern, in `parts` equal shards."""

    dataset: ClassVar[None] = None
    l2: float = 0.0
    norm: str = "batch"
    parts: int = 1

    def model(self) -> nn.Module:
        norm = nn.BatchNorm2d(8) if self.norm == "batch" else nn.GroupNorm(2, 8)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 4)
        )

    def shards(self) -> Sequence[Shard]:
        rng = np.random.default_rng(1)
        y = rng.integers(0, 4, 64)
        x = (rng.normal(size=(64, 1, 8, 8)) + y[:, None, None, None]).astype(np.float32)
        split = np.split(np.arange(64), self.parts)
        return [Shard(x[part], y[part]) for part in split]


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setitem(TASKS, "images", Images)
        Topology.model_rebuild(force=True)
        WrittenTopology.model_rebuild(force=True)
        yield
    Topology.model_rebuild(force=True)
    WrittenTopology.model_rebuild(force=True)


def finished(folder: Path, parts: int, rounds: int, **other: Any) -> tuple[Run, Vector, Buffers]:
    """A run and its last model; full batches, a step a round."""
    topology = _topology(
        folder,
        seed=SEED,
        **{
            "task": {
                "name": "images",
                "parts": parts,
                "local": {"steps": 1, "batch_size": 64, "lr": LR},
                **other.pop("task", {}),
            },
            "rule": {"name": "fedavg"},
            "devices": [{"name": "d", "count": parts, "timing": "1s"}],
            "evaluate": {"every": "5s"},
            "stop": {"updates": rounds * parts},
            "durability": "recording",
            **other,
        },
    )
    run = _run(topology, folder)
    w, _, buffers = payloads.unpack((run.path / "models" / "final.safetensors").read_bytes())
    return run, w, buffers


def plain(task: Task, rounds: int) -> nn.Module:
    """Gradient descent on all samples, as PyTorch has it."""
    torch.manual_seed(SEED)
    module = task.model()
    shards = task.shards()
    x, y = (torch.from_numpy(np.concatenate([getattr(s, part) for s in shards])) for part in ("x", "y"))
    optimizer = torch.optim.SGD(module.parameters(), LR)
    for _ in range(rounds):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return module


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in the order in which a thread of virtual time makes them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("rule", [{"name": "fedavg"}, {"name": "fedasync", "mixing": 1.0}], ids=str)
def test_single_client_equals_plain_sgd_bit_by_bit(
    rule: dict[str, Any], one_thread: None, tmp_path: Path
) -> None:
    """Buffers too, and the evaluations are those of the same module; and a replay is the same."""
    run, w, buffers = finished(tmp_path, 1, ROUNDS, rule=rule)
    module = plain(Images(), ROUNDS)
    np.testing.assert_array_equal(w, initial(module))
    assert buffers.equals(buffers_of(module))
    assert buffers.integers.tolist() == [ROUNDS]
    (shard,) = Images().shards()
    module.eval()
    with torch.no_grad():
        right = module(torch.from_numpy(shard.x)).argmax(1).numpy() == shard.y
    assert right.mean() > 0.5
    assert run.evaluations["accuracy"].iloc[-1] == pytest.approx(right.mean())
    assert replay(RunDirectory(run.path)).models == 2


def test_single_client_in_processes_equals_plain_sgd(one_thread: None, tmp_path: Path) -> None:
    own = """from __future__ import annotations
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
from torch import nn
from agents.shards import Shard
from agents.tasks.interface import Task
"""
    (tmp_path / "own.py").write_text(own + inspect.getsource(Images))
    topology = {
        "name": "exact",
        "seed": SEED,
        "code": "own.py",
        "task": {"name": "own:Images", "local": {"steps": 1, "batch_size": 64, "lr": LR}},
        "rule": {"name": "fedavg"},
        "devices": [{"name": "d", "cpu": 0.3}],
        "stop": {"updates": ROUNDS},
    }
    (tmp_path / "exact.yaml").write_text(yaml.safe_dump(topology))
    done = cli("up", tmp_path / "exact.yaml", "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    run = Finished.only_one_in(tmp_path / "runs")
    w, _, buffers = payloads.unpack((run.path / "models" / "final.safetensors").read_bytes())
    module = plain(Images(), ROUNDS)
    np.testing.assert_array_equal(w, initial(module))
    assert buffers.equals(buffers_of(module))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_client_trainer_equals_plain_sgd_bit_by_bit(norm: str, one_thread: None) -> None:
    task = Images(norm=norm)
    (shard,) = task.shards()
    torch.manual_seed(SEED)
    first = task.model()
    trainer = Trainer(task, shard, LocalTraining(steps=ROUNDS, batch_size=64, lr=LR))
    start, before = initial(first), buffers_of(first)
    end = trainer.train(start, np.random.default_rng(0), buffers=before)
    module = plain(task, ROUNDS)
    np.testing.assert_array_equal(end.end, initial(module))
    assert end.buffers.equals(buffers_of(module))


def test_full_batch_step_on_equal_shards_equals_a_central_step(tmp_path: Path) -> None:
    _, w, _ = finished(tmp_path, 4, 1, task={"norm": "group"})
    np.testing.assert_allclose(w, initial(plain(Images(norm="group"), 1)), atol=1e-6)


def test_batch_statistics_average_all_clients(tmp_path: Path) -> None:
    """After a round: 0.9 times the first ones and 0.1 times the mean of the clients' batches."""
    _, _, buffers = finished(tmp_path, 4, 1)
    torch.manual_seed(SEED)
    first = Images().model()
    assert isinstance(first, nn.Sequential)
    with torch.no_grad():
        outputs = [first[0](torch.from_numpy(shard.x)) for shard in Images(parts=4).shards()]
    means = torch.stack([out.mean((0, 2, 3)) for out in outputs]).mean(0)
    np.testing.assert_allclose(buffers.floats[:8], 0.1 * means, rtol=1e-5)
    assert buffers.integers.tolist() == [1]


@pytest.mark.parametrize(
    "rule",
    [
        {"name": "area", "every": 2},
        {"name": "asysg", "gradients": 2},
        {"name": "defedavg_niid", "sample": 2},
        {"name": "favano", "period": "900ms", "sample": 2},
        {"name": "fedasync"},
        {"name": "fedfa", "window_size": 2},
    ],
    ids=lambda rule: rule["name"],
)
def test_every_kind_of_update_carries_buffers(rule: dict[str, Any], tmp_path: Path) -> None:
    """Deltas, models, residuals, gradients, pulled and interrupted ones; and a replay is the same."""
    steps = {"local": {"steps": 4, "batch_size": 8, "lr": 0.05}}
    run, _, buffers = finished(
        tmp_path,
        4,
        10,
        task=steps,
        rule=rule,
        devices=[{"name": "d", "count": 4, "timing": {"distribution": "exponential", "mean": "1s"}}],
    )
    assert np.isfinite(buffers.floats).all()
    assert abs(buffers.floats[:8]).min() > 0
    assert buffers.integers[0] > 4
    assert replay(RunDirectory(run.path)).updates == len(run.updates)

"""The same seed gives the same bytes in virtual time, whatever a model's code draws and remembers."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from testbed.errors import BadInputError
from testbed.run import preparing, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.view import View

TASK = """
import random
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
import torch
from torch import nn
from agents.tasks.interface import Task

CALLS = []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        {init}

    def forward(self, x):
        x = x.flatten(1)
        {forward}
        return self.layer(x)

@dataclass(frozen=True)
class Mine(Task):
    dataset: ClassVar[str] = "digits"

    def model(self):
        net = Net()
        {model}
        return net
"""
OF_NUMPY = "nn.init.constant_(net.layer.weight, np.random.rand() + random.random())"
DROPOUT = "x = nn.functional.dropout(x, 0.5)"
OWN_DROPOUT = "x = x * (random.random() > 0.2) + np.random.rand()"


def _run(folder: Path, name: str, **parts: str) -> RunDirectory:
    parts = {"init": "pass", "forward": "pass", "model": "pass", **parts}
    (folder / "mine.py").write_text(TASK.format(**parts))
    (folder / "topology.yaml").write_text(
        yaml.safe_dump(
            {
                "name": "t",
                "seed": 3,
                "code": "mine.py",
                "task": {"name": "mine:Mine", "local": {"steps": 4, "batch_size": 8, "lr": 0.1}},
                "rule": {"name": "fedasync"},
                "devices": [{"name": "pi", "count": 2, "timing": "1s"}],
                "evaluate": {"every": "1s"},
                "stop": {"after": "6s"},
                "runtime": {"name": "virtual"},
            }
        )
    )
    parsed, plan = preparing.plan_file(folder / "topology.yaml", Options())
    directory = RunDirectory.create(folder / "runs", name)
    up.run(parsed, plan, directory, Options(), View())
    return directory


def _digest(directory: RunDirectory) -> str:
    (final,) = directory.models.glob("final*")
    records = [
        line for line in directory.events.read_bytes().splitlines() if b'"event":"evaluation"' in line
    ]
    return hashlib.sha256(final.read_bytes() + b"\n".join(records)).hexdigest()


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"model": OF_NUMPY}, id="weights drawn by NumPy and random"),
        pytest.param({"forward": DROPOUT}, id="dropout in evaluations, too"),
        pytest.param({"forward": OWN_DROPOUT}, id="dropout by NumPy and random"),
    ],
)
def test_random_draws_of_a_model_follow_from_the_seed(tmp_path: Path, parts: dict[str, str]) -> None:
    digests = {_digest(_run(tmp_path, f"run-{k}", **parts)) for k in range(3)}
    assert len(digests) == 1


def test_run_leaves_the_random_generators_of_its_process_alone(tmp_path: Path) -> None:
    np.random.seed(5)
    random.seed(5)
    torch.manual_seed(5)
    expected = np.random.RandomState(5).rand(), random.Random(5).random()  # noqa: S311
    state = torch.get_rng_state()
    _run(tmp_path, "run", model=OF_NUMPY, forward=OWN_DROPOUT)
    assert (np.random.rand(), random.random()) == expected  # noqa: S311
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("init", "forward", "named"),
    [
        ("self.calls = 0", "self.calls += 1; x = x * self.calls", "calls"),
        ("self.seen = []", "self.seen.append(len(x))", "seen"),
        (
            "self.register_buffer('mean', torch.zeros(64), persistent=False)",
            "self.mean.add_(x.mean(0))",
            "mean",
        ),
        (
            "self.half = torch.zeros(1, dtype=torch.bfloat16)",
            "self.half += 1; x = x * self.half",
            "half",
        ),
        ("self.own = torch.Generator()", "x = x * torch.rand(64, generator=self.own)", "own"),
        ("self.rng = np.random.default_rng(0)", "x = x * self.rng.random()", "rng"),
        ("Net.steps = 0", "Net.steps += 1; x = x * Net.steps", "steps"),
        ("pass", "CALLS.append(0); x = x * len(CALLS)", "a variable outside of its module"),
    ],
)
def test_state_that_devices_would_share_is_refused(
    tmp_path: Path, init: str, forward: str, named: str
) -> None:
    with pytest.raises(BadInputError, match=rf"Mine changes {named} in each step.*register_buffer"):
        _run(tmp_path, "run", init=init, forward=forward)


@pytest.mark.parametrize(
    ("init", "forward"),
    [
        ("self.cache = None", "self.cache = x.new_ones(64) if self.cache is None else self.cache"),
        ("self.last = None", "self.last = nn.functional.dropout(x, 0.5, self.training)"),
    ],
)
def test_cache_of_a_model_is_no_state(tmp_path: Path, init: str, forward: str) -> None:
    assert _run(tmp_path, "run", init=init, forward=forward).events.exists()

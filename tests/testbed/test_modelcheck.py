"""Models that cannot be exchanged are refused before anything is launched; the size of the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from agents.tasks import TASKS
from agents.tasks.interface import Task
from testbed.errors import BadInputError
from testbed.fleets.settings import WrittenTopology
from testbed.plan import model_check
from testbed.topology import Topology, parse
from tests.running import Testbed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Normed(Task):
    """Digits through a normalisation that the topology chooses."""

    dataset: ClassVar[str] = "digits"
    l2: float = 0.0
    norm: str = "batch"

    def model(self) -> torch.nn.Module:
        import torch
        from torch import nn

        norms = {
            "batch": nn.BatchNorm1d(16),
            "untracked": nn.BatchNorm1d(16, track_running_stats=False),
            "group": nn.GroupNorm(4, 16),
            "half": nn.LayerNorm(16, dtype=torch.float16),
            "frozen": nn.LayerNorm(16).requires_grad_(requires_grad=False),
        }
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), norms[self.norm], nn.Linear(16, 10))


@pytest.fixture(autouse=True)
def normed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A task `normed`, as a line in TASKS gives it, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setitem(TASKS, "normed", Normed)
        _read_tasks()
        yield
    _read_tasks()


def _read_tasks() -> None:
    Topology.model_rebuild(force=True)
    WrittenTopology.model_rebuild(force=True)


def _text(norm: str) -> str:
    return (
        "name: t\n"
        f"task: {{name: normed, norm: {norm}, local: {{steps: 1}}}}\n"
        "rule: {name: fedavg}\n"
        "devices: [{name: a, cpu: 0.1}]\n"
        "stop: {after: 1s}\n"
    )


@pytest.mark.parametrize(
    "command",
    [
        ["validate"],
        ["plan", "--runtime", "docker"],
        ["up", "--runtime", "docker"],
        ["up", "--runtime", "process"],
        ["up", "--runtime", "virtual"],
    ],
    ids=" ".join,
)
def test_models_that_cannot_be_sent_are_refused_before_launch(
    command: list[str], testbed: Testbed, tmp_path: Path
) -> None:
    file, runs = tmp_path / "t.yaml", tmp_path / "runs"
    file.write_text(_text("half"))
    said = testbed(*command, file, *(["--runs", runs] if command[0] == "up" else []))
    assert said.code == 2
    assert f"{file}:2:14: task.name: normed cannot run: the model has parameters that are" in said.err
    assert "(2.weight: torch.float16, 2.bias: torch.float16)" in said.err
    assert said.out == ""
    assert not runs.exists()


def test_model_size_includes_buffers_but_no_frozen_parameters() -> None:
    plain = 16 * 65 + 10 * 17
    assert model_check.check(parse(_text("group"))) == plain + 2 * 16
    assert model_check.check(parse(_text("untracked"))) == plain + 2 * 16
    # Mean and variance, and a counter of 8 bytes.
    assert model_check.check(parse(_text("batch"))) == plain + 2 * 16 + 2 * 16 + 2
    assert model_check.check(parse(_text("frozen"))) == plain


def test_checked_model_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built again only for other parameters of the task."""
    built = []
    model = Normed.model

    def counted(task: Normed) -> torch.nn.Module:
        built.append(task.norm)
        return model(task)

    monkeypatch.setattr(Normed, "model", counted)
    for norm in ("group", "group", "untracked"):
        model_check.check(parse(_text(norm)))
    assert built == ["group", "untracked"]
    for _ in range(2):
        with pytest.raises(BadInputError):
            model_check.check(parse(_text("half")))
    assert built == ["group", "untracked", "half", "half"]

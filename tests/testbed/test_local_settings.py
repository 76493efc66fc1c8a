"""Settings of local training, of the first model and of frozen layers, from the topology to the end."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import pytest
import torch

from agents.config import LocalTraining, Schedule
from agents.tasks import TASKS
from testbed import simulate
from testbed.errors import BadInputError
from testbed.plan import model_check, models
from testbed.rundir.directory import RunDirectory
from testbed.topology import parse
from tests.running import Testbed

TEXT = """
name: t
task:
  name: digits-logreg
  local: {steps: 5, lr: 0.05%s}
%s
rule: {name: %s}
devices:
  - {name: a, cpu: 0.5, local: {%s}}
virtual: {step_time: 1ms}
stop: {updates: 12}
"""


def _text(local: str = "", task: str = "", rule: str = "fedavg", group: str = "") -> str:
    return TEXT % (local and f", {local}", task and f"  {task}", rule, group)


def test_group_overrides_only_its_keys() -> None:
    shared = "optimizer: adam, lr_by_version: {over: 10, to: 0.5}"
    parsed = parse(_text(shared, group="lr_by_step: {shape: cosine, over: 5}, clip_gradient: 1"))
    local = parsed.devices[0].local.build()
    assert local == LocalTraining(
        steps=5,
        lr=0.05,
        optimizer="adam",
        lr_by_version=Schedule(over=10, to=0.5),
        lr_by_step=Schedule(shape="cosine", over=5),
        clip_gradient=1.0,
    )
    assert parse(parsed.to_yaml()) == parsed


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (_text("optimizer: rmsprop"), ":5:42: task.local.optimizer: found 'rmsprop', expected"),
        (_text("lr_by_step: {over: 0}"), ":5:50: task.local.lr_by_step.over: found 0, expected a whole"),
        (_text("lr_by_step: {shape: cosine}"), ":5:43: task.local.lr_by_step: over is missing"),
        (_text("lr_by_version: {ovr: 3}"), "task.local.lr_by_version.ovr: unknown key"),
        (_text("lr_by_version: 3"), ":5:46: task.local.lr_by_version: found 3"),
        (_text("optimizer: adam, momentum: 0.9"), ":5:58: task.local.momentum: found 0.9"),
        (_text("optimizer: adam, fednova: true"), "sgd without lr_by_step, or remove fednova"),
        (_text("momentum: 0.9", group="optimizer: adamw"), ":9:25: devices[0].local"),
        (_text("optimizer: adam", rule="asysg, gradients: 1"), ":5:31: task.local.optimizer"),
        (
            _text(rule="asysg, gradients: 1", group="weight_decay: 0.1"),
            ":9:33: devices[0].local.weight_decay: the clients of asysg send one gradient",
        ),
        (_text("momentum: 0.9", rule="asysg, gradients: 1"), "task.local.momentum: the clients"),
        (_text("proximal: 0.1", rule="asysg, gradients: 1"), "task.local.proximal: the clients"),
        (_text(rule="asysg, gradients: 1", group="clip: 1"), "local.clip: the clients of asysg send"),
    ],
)
def test_conflicting_settings_are_refused(text: str, told: str) -> None:
    with pytest.raises(BadInputError) as caught:
        parse(text)
    assert told in str(caught.value)


def test_pattern_matching_no_parameter_is_refused() -> None:
    with pytest.raises(BadInputError, match=r":6:12: task.frozen\[0\]"):
        model_check.check(parse(_text(task="frozen: [2.*]")))
    with pytest.raises(BadInputError, match="no parameters to train"):
        model_check.check(parse(_text(task="frozen: [1.*]")))
    assert model_check.check(parse(_text(task="frozen: [1.bias]"))) == 640


def test_run_starts_from_the_model_of_another_run(tmp_path: Path, testbed: Testbed) -> None:
    """The second freezes the weights: only the bias changes, whatever trains it."""
    first = simulate(_text("optimizer: adam"), runs=tmp_path)
    assert testbed("export", first.path, "--model", "--to", tmp_path / "first.pt").code == 0
    module = TASKS["digits-logreg"]().model()
    module.load_state_dict(torch.load(tmp_path / "first.pt"))
    assert next(module.parameters()).abs().sum() > 0
    for number, file in enumerate((first.path / "models/final.safetensors", tmp_path / "first.pt")):
        begins = f"initial: {file}\n  frozen: [1.weight]"
        second = simulate(_text("lr_by_version: {over: 40}", begins), runs=tmp_path / str(number))
        directory = RunDirectory(second.path)
        start = models.saved_state(directory, models.saved_model(directory, 0))
        end = models.saved_state(directory, models.saved_model(directory))
        for name, tensor in module.state_dict().items():
            assert torch.equal(start[name], tensor)
        assert torch.equal(end["1.weight"], start["1.weight"])
        assert not torch.equal(end["1.bias"], start["1.bias"])
        accuracies = second.evaluations["accuracy"]
        assert accuracies.iloc[0] == first.evaluations["accuracy"].iloc[-1]


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"1.bias": None}, "1.bias is missing"),
        ({"1.weight": torch.zeros(10, 63)}, "1.weight has shape [10"),
        ({"fc": torch.zeros(1)}, "the model has no parameter or buffer of that name"),
        ({"1.bias": torch.full((10,), torch.nan)}, "1.bias has values that are not finite"),
        ({"1.weight": torch.zeros(10, 64).double() + 1e300}, "1.weight has values that are not fin"),
        ({"1.bias": torch.zeros(10).to_sparse()}, "1.bias is sparse"),
        ({"1.bias": torch.zeros(10, dtype=torch.complex64)}, "1.bias has type complex64, expected flo"),
        ({1: torch.zeros(10)}, "not a mapping of names to tensors"),
        ([1, 2], "not a mapping of names to tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_initial_model_that_does_not_fit_is_refused_with_place(
    state: object, told: str, tmp_path: Path, testbed: Testbed
) -> None:
    if isinstance(state, dict):  # a whole state, with these in place of its own
        state = {"1.weight": torch.zeros(10, 64), "1.bias": torch.zeros(10), **state}
        state = {name: tensor for name, tensor in state.items() if tensor is not None}
    torch.save(state, tmp_path / "first.pt")
    (tmp_path / "t.yaml").write_text(_text(task="initial: first.pt"))
    said = testbed("validate", tmp_path / "t.yaml")
    assert said.code == 2
    assert "t.yaml:6:12: task.initial: " in said.err
    assert told in said.err


def test_saved_model_with_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    directory = RunDirectory(simulate(_text(), runs=tmp_path).path)
    saved = models.saved_model(directory)
    data = saved.read_bytes()
    saved.write_bytes(data[:-4] + struct.pack("<f", math.nan))
    with pytest.raises(BadInputError, match=r"final\.safetensors cannot be read .*not finite"):
        models.saved_state(directory, saved)


@pytest.mark.parametrize("name", ["first.pt", "first.safetensors"])
def test_initial_model_that_is_no_file_is_refused(name: str, tmp_path: Path) -> None:
    path, settings = tmp_path / name, parse(_text(task=f"initial: {tmp_path / name}"))
    for make in (path.mkdir, path.rmdir, lambda: os.mkfifo(path)):
        make()
        with pytest.raises(BadInputError, match=r"task\.initial: .*Expected safetensors"):
            models.check_initial(settings)

"""A new step of what is done to updates: a module and a row in `STEPS`, and runs do it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import load_file

import testbed
from agents.models.vectors import Vector
from agents.pipeline.interface import ClientContext, ClientStep, ServerStep, UpdateStep
from agents.pipeline.steps import STEPS
from agents.wire.payloads import Encoded
from testbed.errors import BadInputError

TOPOLOGY = """
name: t
task: {name: digits-logreg, local: {steps: 2}}
rule: RULE
devices: [{name: a, count: 2, timing: 1s, steps: {top_one: {factor: 2.0}}}]
stop: {updates: 3}
"""


@dataclass(frozen=True)
class TopOne(UpdateStep):
    """Only the largest coordinate is sent, `factor` times as large."""

    field: ClassVar[str | None] = "place"
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ValueError(f"factor is {self.factor:g}, expected above 0")

    def at_client(self, client: ClientContext) -> ClientStep:
        return _TopOneAtClient(self.factor)

    def at_server(self, parameters: int) -> ServerStep:
        return _TopOneAtServer(parameters)


class _TopOneAtClient(ClientStep):
    def __init__(self, factor: float) -> None:
        self._factor = np.float32(factor)

    def apply(self, progress: Vector, sequence: int, dispatch: int) -> Encoded:
        place = int(np.abs(progress).argmax())
        return Encoded({"place": str(place)}, {"w": self._factor * progress[place : place + 1]})


class _TopOneAtServer(ServerStep):
    def __init__(self, parameters: int) -> None:
        self._parameters = parameters

    def decode(self, encoded: Encoded) -> Vector:
        vector = np.zeros(self._parameters, np.float32)
        vector[int(encoded.fields["place"])] = encoded.arrays["w"][0]
        return vector


@pytest.fixture(autouse=True)
def _row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPS, "top_one", TopOne)


@pytest.mark.parametrize("rule", ["{name: fedbuff, buffer_size: 1}", "{name: fedasync}"])
def test_run_applies_an_added_update_step(rule: str, tmp_path: Path) -> None:
    """It is applied to a delta, and to a model, which is sent as the difference to its base."""
    run = testbed.simulate(TOPOLOGY.replace("RULE", rule), runs=tmp_path)
    first, last = (
        load_file(run.path / "models" / f"{name}.safetensors") for name in ("000000", "final")
    )
    changed = sum(np.count_nonzero(last[name] != first[name]) for name in first)
    assert 1 <= changed <= 3
    assert (run.updates["bytes"] < 1000).all()
    assert (run.updates["bytes_before"] > 2600).all()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("top_one", "top_two", "found top_two, expected one of top_one"),
        ("2.0", "0", "factor is 0, expected above 0"),
        ("factor", "share", "share"),
        ("timing: 1s", "timing: 1s, link: {compression: {kind: fp16}}", "compression and top_one"),
        ("RULE", "{name: area, every: 2}", "applied unchanged"),
    ],
)
def test_invalid_settings_of_an_added_step_are_refused(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    text: Any = TOPOLOGY.replace(old, new).replace("RULE", "{name: fedavg}")
    with pytest.raises(BadInputError, match=message):
        testbed.simulate(text, runs=tmp_path)

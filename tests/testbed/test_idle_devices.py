"""Devices without a mini-batch wait: no rule knows them, and everything else is as without them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from agents import events
from analysis.load import Run
from testbed import simulate, topology
from testbed.data import preparation
from testbed.errors import BadInputError
from testbed.plan import HostResources, plan, rounds
from tests.running import Finished, Testbed

TEXT = """
name: t
task: {{name: digits-logreg, importance: {importance}, local: {{epochs: 1, batch_size: 32, lr: 0.05}}}}
rule: {{name: {rule}}}
devices:
  - {{name: a, count: 3, cpu: 0.5}}
{more}
evaluate: {{every: 1s, devices: 20}}
virtual: {{step_time: 1ms}}
stop: {{updates: 12, after: 60s}}
"""
NO_DATA = "  - {name: z, cpu: 0.5, data: {samples: 0}}"
TOO_FEW = "  - {name: y, cpu: 0.5, data: {samples: 9}, local: {last_batch: drop}}"
RULES = {
    "fedavg": "samples",
    "fedavg, sample: 2": "uniform",
    "fedbuff, buffer_size: 2": "uniform",
    "fedasync": "uniform",
    "asysg, gradients: 2": "uniform",
    "area, criterion: every, every: 1": "uniform",
    "defedavg_niid, sample: 2": "uniform",
    "fedfix, period: 1s": "uniform",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def text(more: str = "", rule: str = "fedavg", importance: str = "uniform") -> str:
    return TEXT.format(more=more, rule=rule, importance=importance)


def model(run: Run) -> bytes:
    return (run.path / "models/final.safetensors").read_bytes()


@pytest.mark.parametrize("rule", RULES)
def test_rule_gives_the_same_model_as_without_the_device(rule: str, tmp_path: Path) -> None:
    alone = simulate(text("", rule, RULES[rule]), runs=tmp_path / "alone")
    done = simulate(text(NO_DATA, rule, RULES[rule]), runs=tmp_path / "beside")
    np.testing.assert_array_equal(done.updates["arrived"], alone.updates["arrived"])
    np.testing.assert_array_equal(done.updates["loss"], alone.updates["loss"])
    weights = {name: device["importance"] for name, device in done.manifest["devices"].items()}
    assert weights.pop("z") == 0
    assert weights == {name: one["importance"] for name, one in alone.manifest["devices"].items()}
    assert done.started is not None
    assert set(done.started.clients) == {"a-1", "a-2", "a-3", "z"}


def test_presence_of_an_idle_device_is_recorded(tmp_path: Path) -> None:
    scenario = "scenario: [{at: 0.01s, crash: z, restart_after: 0.01s}, {at: 0.05s, leave: z}]"
    done = simulate(text(f"{NO_DATA}\n{scenario}"), runs=tmp_path)
    states = done.statuses[done.statuses["client"] == "z"]["state"].tolist()
    assert states == ["offline", "joining", "ready", "offline"]
    assert len(done.updates) == 12


def test_device_with_too_few_samples_is_evaluated_and_does_not_train(tmp_path: Path) -> None:
    done = simulate(text(f"{NO_DATA}\n{TOO_FEW}", importance="samples"), runs=tmp_path)
    assert set(done.updates["client"]) == {"a-1", "a-2", "a-3"}
    assert set(done.parts["name"]) == {"a-1", "a-2", "a-3", "y"}
    shares = [device["importance"] for device in done.manifest["devices"].values()]
    assert shares[:3] == [476 / 1428] * 3
    assert shares[3:] == [0, 0]
    told = "z, y will not train: too few samples for a mini-batch. No rule sends them a model."
    assert told in done.manifest["data"]


def test_preparation_and_plan_show_that_a_device_waits() -> None:
    more = f"{NO_DATA}\n{TOO_FEW}"
    read = topology.parse(text(more).replace("devices: 20", "on: clients, samples: 10"))
    assert len(preparation.prepare(read, None).test) == 30
    sizes = "{scheme: InnerDirichletPartitioner, partition_sizes: [0, 600, 600], alpha: 1.0}"
    changed = text().replace("importance:", f"partition: {sizes}, importance:")
    prepared = preparation.prepare(topology.parse(changed), None)
    assert [len(own) for own in prepared.indices.values()] == [0, 600, 600]
    assert prepared.remarks[-1].startswith("a-1 will not train")
    read = topology.parse(text(NO_DATA))
    planned = plan(read, "virtual", HostResources((0, 1), 2**34))
    expected = rounds.estimate_rounds(read, planned, 650, {"a-1": 10, "a-2": 10, "a-3": 10, "z": 0})
    assert (expected["z"].transfer, expected["z"].seconds) == (0, 0)
    assert expected["a-1"].seconds > 0
    assert "z will not train: too few samples" in " ".join(rounds.remarks(read, expected))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("count: 3, ", "count: 3, data: {samples: 0}, ", "every device has samples: 0, so that none"),
        ("name: fedavg", "name: fedavg, sample: 4", "sample"),
        (
            "batch_size: 32, ",
            "batch_size: 900, last_batch: drop, ",
            "no device can train: give at least",
        ),
    ],
)
def test_run_that_cannot_work_without_the_device_is_refused(old: str, new: str, told: str) -> None:
    changed = text(NO_DATA).replace(old, new, 1)
    with pytest.raises(BadInputError) as refused:
        preparation.prepare(topology.parse(changed), None)
    assert told in str(refused.value)


def test_idle_client_process_waits_until_the_end(testbed: Testbed, tmp_path: Path) -> None:
    slower = text(f"{NO_DATA}\n{TOO_FEW}").replace("cpu: 0.5", "cpu: 0.1")
    (tmp_path / "t.yaml").write_text(slower)
    done = testbed("up", tmp_path / "t.yaml", "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.code == 0, done.out + done.err
    run = Finished.only_one_in(tmp_path / "runs")
    (started,) = (each for each in run.records if isinstance(each, events.RunStarted))
    assert set(started.clients) == {"a-1", "a-2", "a-3", "z", "y"}
    assert {update.client for update in run.updates} == {"a-1", "a-2", "a-3"}
    assert not math.isnan(run.best_accuracy)

"""Evaluation by class and by device, in the run and of its kept models afterwards."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from agents.tasks.logreg import DigitsLogreg
from analysis import report, summary
from testbed import simulate
from tests.running import Testbed

TEXT = """
name: t
task: {name: digits-logreg, partition: {scheme: dirichlet, alpha: 0.3}, local: {steps: 5, lr: 0.05}}
rule: {name: fedavg}
devices: [{name: a, count: 3, cpu: 0.5}]
virtual: {step_time: 1ms}
evaluate: {every: 1s, classes: true, devices: 40}
stop: {updates: 12}
"""


def test_run_records_loss_and_accuracy_per_class_and_device(
    tmp_path: Path, testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DigitsLogreg, "has_perplexity", True)
    run = simulate(TEXT, runs=tmp_path)
    classes, devices = (run.parts[run.parts["part"] == part] for part in ("class", "device"))
    for version, evaluation in run.evaluations.set_index("version").iterrows():
        own = classes[classes["version"] == version]
        assert list(own["name"]) == [str(label) for label in range(10)]
        assert own["samples"].sum() == 360
        for figure in ("loss", "accuracy"):  # the l2 term is in each part's loss
            mean = np.average(own[figure], weights=own["samples"])
            assert mean == pytest.approx(evaluation[figure], rel=1e-5)
        assert set(own["at"]) == {evaluation["at"]}
        theirs = devices[devices["version"] == version]
        assert list(theirs["name"]) == ["a-1", "a-2", "a-3"]
        assert list(theirs["samples"]) == [min(40, n) for n in run.devices["samples"]]
    assert devices["loss"].nunique() > 3
    losses = summary.last_parts(run, "device")["loss"].tolist()
    assert losses == sorted(losses)
    last = run.evaluations.iloc[-1]
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert f"perplexity {last['perplexity']:.4g}" in summary.headline(run).quality
    page = report.html([run])
    assert "Last evaluation by class" in page
    assert "Last evaluation by device" in page
    run.export(tmp_path / "tables", "csv")
    assert len(pd.read_csv(tmp_path / "tables" / "parts.csv")) == len(run.parts)

    said = testbed("evaluate", run.path, "--to", tmp_path / "all.csv", "--json")
    assert said.code == 0, said.err
    rows = json.loads(said.out)
    final = {(row["part"], row["name"]): row for row in rows if row["model"] == "final"}
    assert final["test set", ""]["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert final["test set", ""]["perplexity"] == pytest.approx(last["perplexity"], rel=1e-5)
    for _, part in run.parts[run.parts["version"] == last["version"]].iterrows():
        assert final[part["part"], part["name"]]["loss"] == pytest.approx(part["loss"], rel=1e-5)
    assert len(pd.read_csv(tmp_path / "all.csv")) == len(rows)


def test_finished_run_is_evaluated_by_other_parts_and_a_damaged_model_is_named(
    tmp_path: Path, testbed: Testbed
) -> None:
    text = TEXT.replace(", classes: true, devices: 40", "")
    run = simulate(text, runs=tmp_path)
    assert run.parts.empty
    said = testbed("evaluate", run.path, "--devices", "10", "--json")
    assert {row["part"] for row in json.loads(said.out)} == {"test set", "device"}
    (run.path / "models" / "final.safetensors").write_bytes(b"x")
    said = testbed("evaluate", run.path)
    assert said.code == 2
    assert "final.safetensors cannot be read as a model" in said.err

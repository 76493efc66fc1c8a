"""By hand, on the twelve records of `conftest`."""

from __future__ import annotations

import json
from math import inf, isnan, nan
from pathlib import Path

import pytest

from analysis import metrics, summary
from analysis.load import load
from analysis.names import distinct
from tests.analysis.conftest import EVENTS


def test_what_it_took_to_reach_an_accuracy(directory: Path) -> None:
    run = load(directory)
    # the evaluation at 5 s is the first of at least 80%: version 2, of two updates of 2600 bytes
    assert metrics.reached(run, 0.8) == metrics.Reached(5.0, 2.0, 2.0, 5200.0)
    assert metrics.reached(run, 0.1) == metrics.Reached(0.0, 0.0, 0.0, 0.0)
    assert isnan(metrics.reached(run, 0.9).time)


def test_evaluations_count_in_the_order_of_their_models(directory: Path) -> None:
    (directory / "events.jsonl").write_text("\n".join([*EVENTS[:6], EVENTS[10], EVENTS[6]]) + "\n")
    assert metrics.reached(load(directory), 0.8).time == 5.0


def test_when_a_quality_was_crossed_is_interpolated(directory: Path) -> None:
    run = load(directory)
    assert metrics.crossed(run, "accuracy", 0.475) == 2.5  # halfway from 10% at 0 s to 85% at 5 s
    assert metrics.crossed(run, "accuracy", 0.85) == 5.0
    assert metrics.crossed(run, "accuracy", 0.05) == 0.0
    assert metrics.crossed(run, "accuracy", 0.9) == inf
    assert metrics.crossed(run, "loss", 1.6) == pytest.approx(2.5)
    assert metrics.crossed(run, "loss", 0.8) == inf


def test_the_final_quality_is_that_of_the_last_part_of_the_time(directory: Path) -> None:
    run = load(directory)
    assert metrics.final(run, "accuracy") == 0.8
    assert metrics.final(run, "accuracy", share=0.5) == pytest.approx(0.825)
    assert metrics.final(run, "loss", share=0.5) == pytest.approx(1.0)
    (directory / "events.jsonl").write_text(EVENTS[0] + "\n")
    assert isnan(metrics.final(load(directory), "loss"))
    assert metrics.crossed(load(directory), "loss", 1.0) == inf


def test_speed_up() -> None:
    assert metrics.speed_up(5.0, 7.5) == 1.5
    assert isnan(metrics.speed_up(nan, 7.5))
    assert isnan(metrics.speed_up(5.0, nan))
    assert metrics.speed_up(0.0, 0.0) == 1.0  # both were good enough from the start
    assert metrics.speed_up(0.0, 7.5) == inf


def test_staleness_per_group_and_over_all(directory: Path) -> None:
    run = load(directory)
    table = metrics.staleness(run)
    assert table.index.tolist() == ["pi"]  # of 0, 0, 2
    row = table.loc["pi"]
    assert row["count"] == 3
    assert row["mean"] == pytest.approx(2 / 3)
    assert row["std"] == pytest.approx((4 / 3) ** 0.5)
    assert [row[name] for name in ("p50", "p90", "max")] == pytest.approx([0.0, 1.6, 2.0])
    by_client = metrics.staleness(run, "client")
    assert (by_client.index.tolist(), by_client["max"].tolist()) == (["fast", "slow"], [0, 2])
    assert metrics.staleness(run, None).index.tolist() == ["all"]


def test_utilisation(directory: Path) -> None:
    table = metrics.utilisation(load(directory))
    spent = {"download": 0.1, "train": 0.2, "upload": 0.1, "wait": 0.6, "paused": 0, "offline": 0}
    assert dict(table.loc["fast"].items()) == pytest.approx({**spent, "busy": 0.4})
    assert table["busy"].tolist() == pytest.approx([0.4, 0.8, 0.0])


def test_effective_importance(directory: Path) -> None:
    table = metrics.contributions(load(directory))
    assert table.index.tolist() == ["fast", "slow", "mute"]
    assert table["group"].tolist() == ["pi", "pi", "nano"]
    assert table["share"].tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert table["weight"].tolist() == pytest.approx([1.0 / 3, 0.5 / 3, 0])  # three versions
    assert table["effective"].tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert table["importance"].tolist() == [0.5, 0.3, 0.2]


def test_bias(directory: Path) -> None:
    found = metrics.bias(load(directory))
    # (1/2 − 2/3)² ÷ 2/3 + (3/10 − 1/3)² ÷ 1/3
    assert found.chi_square == pytest.approx(1 / 24 + 1 / 300)
    assert found.missed == pytest.approx(0.2)
    (directory / "events.jsonl").write_text("")
    assert isnan(metrics.bias(load(directory)).chi_square)


def test_window(directory: Path) -> None:
    # fast is in versions 1 and 2, slow in 3: versions 1 and 2 are without slow, so two are too few
    assert metrics.window(load(directory)) == 3
    (directory / "events.jsonl").write_text("\n".join(EVENTS[:6]) + "\n")
    assert metrics.window(load(directory)) == 1  # only fast, in each
    (directory / "events.jsonl").write_text("")
    assert metrics.window(load(directory)) == 0


def test_fairness_and_participants() -> None:
    assert metrics.jain([1, 1, 1, 1]) == 1.0
    assert metrics.jain([1, 0, 0, 0]) == 0.25
    assert metrics.jain([2, 1, 0]) == pytest.approx(9 / 15)
    assert isnan(metrics.jain([0, 0]))
    assert metrics.effective_participants([2, 1, 0]) == pytest.approx(1.8)


def test_energy(directory: Path) -> None:
    joules = metrics.energy(load(directory), {"pi": {"train": 2.0, "wait": 0.5}})
    # fast: 2 s and 6 s; slow: 6 s and 2 s; nothing is known of the nano
    assert joules.tolist() == pytest.approx([7.0, 13.0, nan], nan_ok=True)
    assert metrics.energy(load(directory)).isna().all()


def test_energy_is_the_plans(directory: Path) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["devices"]["slow"]["power"] = {"train": 7.2}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    run = load(directory)
    assert metrics.energy(run).tolist() == pytest.approx([nan, 43.2, nan], nan_ok=True)  # 6 s
    groups = summary.groups(summary.devices(run))
    assert groups["energy"].tolist() == pytest.approx([43.2, nan], nan_ok=True)


def test_intervals_of_confidence() -> None:
    found = metrics.t_interval([1.0, 2.0, 3.0])
    # t(0.975; 2) = 4.302653, of a standard error of 1 ÷ √3
    assert (found.mean, found.count) == (2.0, 3)
    assert found.high - 2.0 == pytest.approx(4.302653 / 3**0.5)
    assert 2.0 - found.low == pytest.approx(found.high - 2.0)
    alone = metrics.t_interval([5.0])
    assert alone.mean == 5.0
    assert isnan(alone.low)
    assert isnan(metrics.t_interval([1.0, nan]).mean)


def test_over_seeds_puts_runs_together_that_differ_in_nothing_else(tmp_path: Path) -> None:
    runs = []
    for number, (rule, seed, accuracy) in enumerate(
        [("fedbuff", 1, 0.8), ("fedbuff", 2, 0.9), ("area", 1, 0.5)]
    ):
        path = tmp_path / str(number)
        path.mkdir()
        (path / "manifest.json").write_text("{}")
        (path / "topology.yaml").write_text(
            json.dumps({"name": "t", "seed": seed, "rule": {"name": rule}})
        )
        (path / "events.jsonl").write_text(
            f'{{"event":"evaluation","at":1.0,"version":1,"loss":1.0,"accuracy":{accuracy}}}\n'
        )
        runs.append(load(path))
    table = metrics.over_seeds(runs, lambda run: float(run.evaluations["accuracy"].iloc[-1]))
    assert table.index.tolist() == ["fedbuff", "area"]
    assert table["mean"].tolist() == pytest.approx([0.85, 0.5])
    assert table["count"].tolist() == [2, 1]
    assert list(distinct(runs)) == ["fedbuff seed 1", "fedbuff seed 2", "area seed 1"]

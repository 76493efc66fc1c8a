"""Metrics against values by hand, for the twelve records of `conftest` and for `uneven`, where all
counts differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from math import inf, isnan, nan
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from agents.events import ClientsDrawn, Evaluated, RoundUnfinished, UpdateApplied, VersionMade, to_line
from analysis import energy, metrics, selection, summary
from analysis.charts import CHARTS
from analysis.load import Run, load
from analysis.names import distinct
from tests.analysis.conftest import EVENTS, with_records, write_run

DEVICES = {
    "fast": {"group": "pi", "importance": 0.3},
    "slow": {"group": "pi", "importance": 0.25},
    "rare": {"group": "nano", "importance": 0.2},
    "mute": {"group": "nano", "importance": 0.15},
    "dead": {"group": "nano", "importance": 0.1},
}
Round = Mapping[str, float]
"""The weights that clients were given in one aggregation; none in an empty tick."""
FAST: Round = {"fast": 0.5}
BOTH: Round = {"fast": 0.5, "slow": 0.5}


def _told(path: Path, rounds: Sequence[Round], begun: Round | None = None) -> Run:
    """One aggregation a second; of one that has `begun` the version is not recorded yet."""
    lines: list[UpdateApplied | VersionMade] = []
    version, newest = 0, dict.fromkeys(DEVICES, 0)
    for at, weights in enumerate([*rounds, *([] if begun is None else [begun])], start=1):
        version += bool(weights)
        for client, weight in weights.items():
            base, newest[client] = newest[client], version
            lines.append(
                UpdateApplied(
                    client=client,
                    sequence=at,
                    kind="delta",
                    base_version=base,
                    applied_version=version,
                    staleness=version - 1 - base,
                    weight=weight,
                    samples=1,
                    steps=1,
                    loss=0.5,
                    bytes=100,
                    dispatched=at - 1.0,
                    downloaded=at - 1.0,
                    train_start=at - 0.75,
                    train_end=at - 0.25,
                    sent=at - 0.25,
                    arrived=float(at),
                    applied=float(at),
                )
            )
        if at <= len(rounds):
            lines.append(VersionMade(float(at), version, len(weights)))
    topology = "name: uneven\nrule: {name: fedfix, period: 1s}\n"
    return load(write_run(path, [to_line(x).rstrip() for x in lines], topology, {"devices": DEVICES}))


@pytest.fixture
def uneven(tmp_path: Path) -> Run:
    """Eleven aggregations, eight updates, five versions, three of five clients heard."""
    rounds: list[Round] = [
        {},
        {"fast": 0.5},
        {"fast": 0.25, "slow": 0.5},
        {},
        {},
        {"fast": 0.25, "rare": 1.0},
        {},
        {"fast": 0.5},
        {"slow": 1.0, "fast": 0.25},
        {},
        {},
    ]
    return _told(tmp_path, rounds)


def test_cost_to_reach_an_accuracy(directory: Path) -> None:
    run = load(directory)
    # the evaluation at 5 s is the first of at least 80%: version 2, of two updates of 2600 bytes
    assert astuple(metrics.reached(run, 0.8))[:4] == (5.0, 2.0, 2.0, 5200.0)
    assert astuple(metrics.reached(run, 0.1))[:4] == (0.0, 0.0, 0.0, 0.0)
    never = metrics.reached(run, 0.9)
    assert all(map(isnan, (never.time, never.rounds, never.updates, never.bytes)))


def test_evaluations_of_one_instant_keep_their_recorded_order(directory: Path) -> None:
    lines = [to_line(Evaluated(1.0, n, 1.0, 0.8 if n >= 7 else 0.1)).rstrip() for n in range(40)]
    (directory / "events.jsonl").write_text("\n".join([*lines, EVENTS[1]]) + "\n")  # to be sorted
    assert metrics.reached(load(directory), 0.8).rounds == 7


def test_evaluations_are_ordered_by_model_version(directory: Path) -> None:
    (directory / "events.jsonl").write_text("\n".join([*EVENTS[:6], EVENTS[10], EVENTS[6]]) + "\n")
    assert metrics.reached(load(directory), 0.8).time == 5.0


def test_time_of_crossing_a_quality_is_interpolated(directory: Path) -> None:
    run = load(directory)
    assert metrics.crossed(run, "accuracy", 0.475) == 2.5  # halfway from 10% at 0 s to 85% at 5 s
    assert metrics.crossed(run, "accuracy", 0.85) == 5.0
    assert metrics.crossed(run, "accuracy", 0.05) == 0.0
    assert metrics.crossed(run, "accuracy", 0.9) == inf
    assert metrics.crossed(run, "loss", 1.6) == pytest.approx(2.5)
    assert metrics.crossed(run, "loss", 0.8) == inf


def test_non_finite_loss_is_not_interpolated(directory: Path) -> None:
    diverged, learned = Evaluated(6.0, 3, nan, 0.1), Evaluated(8.0, 4, 0.5, 0.9)
    assert metrics.crossed(with_records(directory, diverged, learned), "loss", 0.6) == 8.0


def test_run_that_diverged_at_the_end_has_no_final_loss(directory: Path) -> None:
    run = with_records(directory, Evaluated(9.5, 4, nan, 0.1))
    assert isnan(metrics.final(run, "loss"))
    assert metrics.final(run, "accuracy") == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("every", "count", "share", "expected"),
    [
        (0.3, 10, 0.2, 9.0),  # from 2.4 s on: 8, 9, 10
        (0.1, 10, 0.3, 8.5),  # from 0.7 s on: 7, 8, 9, 10
        (0.7, 10, 0.9, 5.5),  # from 0.7 s on: 1, …, 10
        (86400.1, 10, 0.2, 9.0),
    ],
)
def test_evaluation_at_the_start_of_the_last_part_counts(
    directory: Path, every: float, count: int, share: float, expected: float
) -> None:
    moments = [k * every for k in range(1, count + 1)]
    evaluations = [Evaluated(at, k, float(k), 0.5) for k, at in enumerate(moments, 1)]
    text = EVENTS[0] + "\n" + "".join(map(to_line, evaluations))
    (directory / "events.jsonl").write_text(text)
    assert metrics.final(load(directory), "loss", share) == expected


def test_final_quality_averages_the_last_part_of_the_time(directory: Path) -> None:
    run = load(directory)
    assert metrics.final(run, "accuracy") == 0.8
    assert metrics.final(run, "accuracy", share=0.5) == pytest.approx(0.825)
    assert metrics.final(run, "loss", share=0.5) == pytest.approx(1.0)
    (directory / "events.jsonl").write_text(EVENTS[0] + "\n")
    assert isnan(metrics.final(load(directory), "loss"))
    assert metrics.crossed(load(directory), "loss", 1.0) == inf


def test_speed_up_is_the_ratio_of_times() -> None:
    assert metrics.speed_up(5.0, 7.5) == 1.5
    assert isnan(metrics.speed_up(nan, 7.5))
    assert isnan(metrics.speed_up(5.0, nan))
    assert isnan(metrics.speed_up(0.0, nan))
    assert metrics.speed_up(0.5, 1.0) == 2.0
    assert metrics.speed_up(0.0, 0.0) == 1.0  # both were good enough from the start
    assert metrics.speed_up(0.0, 7.5) == inf


def test_staleness_per_group_and_overall(directory: Path) -> None:
    run = load(directory)
    table = metrics.staleness(run)
    assert table.index.tolist() == ["pi"]  # of 0, 0, 2
    assert table.loc["pi", "std"] == pytest.approx((4 / 3) ** 0.5)
    by_client = metrics.staleness(run, "client")
    assert (by_client.index.tolist(), by_client["max"].tolist()) == (["fast", "slow"], [0, 2])
    assert metrics.staleness(run, None).index.tolist() == ["all"]


def test_staleness_quantiles(uneven: Run) -> None:
    # fast 0, 0, 0, 0, 0; slow 1, 2; rare 2
    row = metrics.staleness(uneven, None).loc["all"]
    assert (row["count"], row["max"]) == (8, 2)
    assert row["mean"] == pytest.approx(5 / 8)
    assert [row[name] for name in ("p50", "p90", "p99")] == pytest.approx([0.0, 2.0, 2.0])
    pi = metrics.staleness(uneven).loc["pi"]  # 0, 0, 0, 0, 0, 1, 2
    assert [pi[name] for name in ("p50", "p90", "p99")] == pytest.approx([0.0, 1.4, 1.94])
    slow = metrics.staleness(uneven, "client").loc["slow"]  # 1, 2
    assert [slow[name] for name in ("p50", "p90", "p99")] == pytest.approx([1.5, 1.9, 1.99])


def test_empty_run_has_no_shares_or_energy(directory: Path) -> None:
    (directory / "events.jsonl").write_text("")
    run = load(directory)
    assert metrics.utilisation(run).isna().all(axis=None)
    joules = energy.joules(run, {"pi": {"train": 2.0}})
    assert joules.isna().all()


def test_utilisation_by_hand(directory: Path) -> None:
    table = metrics.utilisation(load(directory))
    spent = {
        "download": 0.1,
        "mask": 0,
        "train": 0.2,
        "upload": 0.1,
        "unfinished": 0,
        "wait": 0.6,
        "paused": 0,
        "offline": 0,
        "unpowered": 0,
    }
    shares = {"busy": 0.2, "transfer": 0.2, "idle": 0.6}
    assert dict(table.loc["fast"].items()) == pytest.approx({**spent, **shares})
    assert table["busy"].tolist() == pytest.approx([0.2, 0.6, 0.0])


def test_contributions_are_counted_per_aggregation(uneven: Run) -> None:
    assert (len(uneven.updates), uneven.versions["version"].max(), len(uneven.versions)) == (8, 5, 11)
    table = metrics.contributions(uneven)
    assert table.index.name == "device"
    assert table["group"].tolist() == ["pi", "pi", "nano", "nano", "nano"]
    assert table["updates"].tolist() == [5, 2, 1, 0, 0]
    assert table["share"].tolist() == pytest.approx([5 / 8, 2 / 8, 1 / 8, 0, 0])
    assert table["weight"].tolist() == pytest.approx([1.75 / 11, 1.5 / 11, 1 / 11, 0, 0])
    assert table["effective"].tolist() == pytest.approx([1.75 / 4.25, 1.5 / 4.25, 1 / 4.25, 0, 0])
    assert table["importance"].tolist() == [0.3, 0.25, 0.2, 0.15, 0.1]


def test_bias_with_clients_that_never_contribute(uneven: Run) -> None:
    found = metrics.bias(uneven)
    shares = [(0.3, 1.75 / 4.25), (0.25, 1.5 / 4.25), (0.2, 1 / 4.25)]
    assert found.chi_square == pytest.approx(sum((p - q) ** 2 / q for p, q in shares))
    assert found.missed == pytest.approx(0.25)


def test_unplanned_client_has_no_importance(directory: Path) -> None:
    guest = EVENTS[2].replace('"fast"', '"guest"')
    (directory / "events.jsonl").write_text("\n".join([EVENTS[2], guest, EVENTS[3]]) + "\n")
    # half of all weight is a guest's: (1/2 − 1/2)² and (0 − 1/2)² ÷ 1/2
    found = metrics.bias(load(directory))
    assert [found.chi_square, found.missed] == pytest.approx([0.5, 0.5])


def test_rounds_without_updates_do_not_change_the_bias(tmp_path: Path) -> None:
    run = _told(tmp_path, [{}, {}])
    assert metrics.contributions(run)["weight"].tolist() == [0.0] * 5
    assert metrics.contributions(run)["share"].isna().all()
    found = metrics.bias(run)
    assert isnan(found.chi_square)
    assert isnan(found.missed)
    assert metrics.window(run) == 0


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([BOTH, {}, FAST, {}, FAST, {}, FAST, {}, FAST, {}] * 2, 10),  # half of the ticks are empty
        ([{}, {}, {}, FAST], 4),
        ([FAST, {}, {}], 3),
        ([FAST, {}, {}, {}, FAST], 4),
        ([FAST, FAST], 1),
        ([], 0),
    ],
)
def test_empty_ticks_count_in_the_window(rounds: list[Round], expected: int, tmp_path: Path) -> None:
    assert metrics.window(_told(tmp_path, rounds)) == expected


def test_window_is_the_longest_of_any_client(uneven: Run) -> None:
    # fast is in 2, 3, 6, 8 and 9 of 11; slow in 3 and 9; rare in 6: five before it, five after
    assert metrics.window(uneven) == 6


def test_aggregation_counts_before_its_version_is_recorded(tmp_path: Path) -> None:
    run = _told(tmp_path, [FAST, {}, {}], begun={"slow": 1.0, "rare": 1.0})
    assert len(run.versions) == 3
    assert metrics.window(run) == 4
    weights = metrics.contributions(run)["weight"].tolist()
    assert weights == pytest.approx([0.5 / 4, 1 / 4, 1 / 4, 0, 0])


def test_fairness_and_participants() -> None:
    assert metrics.jain([1, 1, 1, 1]) == 1.0
    assert metrics.jain([1, 0, 0, 0]) == 0.25
    assert metrics.jain([2, 1, 0]) == pytest.approx(9 / 15)
    assert isnan(metrics.jain([0, 0]))
    assert metrics.effective_participants([2, 1, 0]) == pytest.approx(1.8)


def test_energy_by_hand(directory: Path) -> None:
    joules = energy.joules(load(directory), {"pi": {"train": 2.0, "wait": 0.5}})
    # fast: 2 s and 6 s; slow: 6 s and 2 s; nothing is known of the nano
    assert joules.tolist() == pytest.approx([7.0, 13.0, nan], nan_ok=True)
    assert joules.name == "joules"
    unknown = energy.joules(load(directory))
    assert unknown.isna().all()
    assert unknown.name == "joules"


def test_unfinished_round_uses_training_power(directory: Path) -> None:
    run = with_records(directory, RoundUnfinished(10.0, "mute", 0, 5.0, 10.0))
    joules = energy.joules(run, {"nano": {"train": 2.0, "wait": 0.5}})
    assert joules["mute"] == pytest.approx(12.5)


def test_energy_uses_the_planned_power(directory: Path) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["devices"]["slow"]["power"] = {"train": 7.2}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    run = load(directory)
    assert energy.joules(run).tolist() == pytest.approx([nan, 43.2, nan], nan_ok=True)  # 6 s
    groups = summary.groups(summary.devices(run))
    assert groups["energy"].tolist() == pytest.approx([43.2, nan], nan_ok=True)


def test_confidence_intervals_by_hand() -> None:
    found = metrics.t_interval([1.0, 2.0, 3.0])
    # t(0.975; 2) = 4.302653, of a standard error of 1 ÷ √3
    assert (found.mean, found.count) == (2.0, 3)
    assert found.high - 2.0 == pytest.approx(4.302653 / 3**0.5)
    assert 2.0 - found.low == pytest.approx(found.high - 2.0)
    wide = metrics.t_interval([1.0, 2.0, 6.0], 0.9)  # t(0.95; 2) = 2.919986, of √7 ÷ √3
    assert wide.mean == 3.0
    assert wide.high - 3.0 == pytest.approx(2.919986 * (7 / 3) ** 0.5)
    nothing = metrics.t_interval([])
    assert nothing.count == 0
    assert all(map(isnan, (nothing.mean, nothing.low, nothing.high)))
    alone = metrics.t_interval([5.0])
    assert alone.mean == 5.0
    assert isnan(alone.low)
    assert isnan(alone.high)
    assert alone.count == 1
    assert isnan(metrics.t_interval([1.0, nan]).mean)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_confidence_intervals_have_the_t_of_scipy(level: float) -> None:
    for count in (*range(2, 40), 1000, 1001):
        values = np.arange(count)
        found = metrics.t_interval([*values], level)
        t = special.stdtrit(count - 1, (1 + level) / 2)
        error = values.std(ddof=1) / np.sqrt(count)
        assert (found.high - found.mean) / error == pytest.approx(t, rel=1e-12), count


def test_kaplan_meier_by_hand() -> None:
    """Of four runs one ends at 1.5 without the target, and two reach it at the same cost."""
    costs, reached = metrics.kaplan_meier([1.0, 2.0, nan, 2.0], [5.0, 5.0, 1.5, 5.0])
    assert costs.tolist() == [1.0, 1.5, 2.0]
    assert reached.tolist() == pytest.approx([0.25, 0.25, 1.0])


def test_over_seeds_groups_runs_that_differ_only_in_the_seed(tmp_path: Path) -> None:
    runs = []
    for rule, seed, accuracy in [("fedbuff", 1, 0.8), ("fedbuff", 2, 0.9), ("area", 1, 0.5)]:
        path = tmp_path / f"{rule}-{seed}"
        path.mkdir()
        topology = json.dumps({"name": "t", "seed": seed, "rule": {"name": rule}})
        line = to_line(Evaluated(1.0, 1, 1.0, accuracy)).rstrip()
        runs.append(load(write_run(path, [line], topology, {})))
    table = metrics.over_seeds(runs, lambda run: float(run.evaluations["accuracy"].iloc[-1]))
    assert table.index.tolist() == ["fedbuff", "area"]
    assert table["mean"].tolist() == pytest.approx([0.85, 0.5])
    assert table["count"].tolist() == [2, 1]
    # t(0.975; 1) = 12.706205, of 0.05
    assert table["low"].tolist() == pytest.approx([0.85 - 0.63531025, nan], nan_ok=True)
    assert table["high"].tolist() == pytest.approx([0.85 + 0.63531025, nan], nan_ok=True)
    assert list(distinct(runs)) == ["fedbuff seed 1", "fedbuff seed 2", "area seed 1"]


def test_participation_counts_draws_in_which_a_device_was_eligible_and_chosen(directory: Path) -> None:
    """`fast` is eligible in draws 1 and 3 of three with an eligible device, `slow` in all of them."""
    run = with_records(
        directory,
        ClientsDrawn(0.0, 1, 1, 2, "slow", "fast slow", ""),
        ClientsDrawn(1.0, 1, 1, 0, "", "", "fast slow"),
        ClientsDrawn(2.0, 2, 1, 1, "slow", "slow", ""),
        ClientsDrawn(3.0, 3, 1, 2, "fast slow", "fast", ""),
    )
    found = selection.participation(run)
    assert found["eligible"].to_dict() == {"fast": 2, "slow": 3, "mute": 0}
    assert found["chosen"].to_dict() == {"fast": 1, "slow": 3, "mute": 0}
    assert found["chosen_share"].to_dict() == pytest.approx(
        {"fast": 0.5, "slow": 1.0, "mute": nan}, nan_ok=True
    )
    assert found["eligible_share"].to_dict() == pytest.approx({"fast": 2 / 3, "slow": 1.0, "mute": 0.0})
    assert selection.participation(load(directory)).equals(found)
    without = replace(run, more={**run.more, "draws": run.draws.iloc[:0]})
    assert selection.participation(without).empty
    chart = CHARTS["participation"]([run])
    assert [layer.name for layer in chart.layers] == ["pi", "nano", "uniform"]
    assert CHARTS["participation"]([without]).is_empty

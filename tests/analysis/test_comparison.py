"""The table of a comparison, by hand: what a target cost, speed-up, intervals over seeds."""

from __future__ import annotations

import io
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import pandas as pd
import pytest

from agents.events import Acted
from analysis import comparison
from analysis.charts import story
from analysis.comparison import TABLE_FORMATS
from analysis.load import Run, load
from tests.analysis.conftest import EVENTS, MANIFEST, with_records, write_run


def _good_at(seconds: float) -> list[str]:
    """The records, but that 85 % came then, not after 5 s."""
    evaluation = '"at":{},"version":2,"loss"'
    lines = [line.replace(evaluation.format(5.0), evaluation.format(seconds)) for line in EVENTS]
    assert lines != EVENTS
    return lines


@pytest.fixture
def by_hand(directory: Path) -> Run:
    return load(directory)


@pytest.fixture
def sooner(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Another seed of the same: 85 % came after 3 s, not 5."""
    lines = _good_at(3.0)
    topology = "name: by-hand\nrule: {name: fedbuff, buffer_size: 1}\nseed: 1\n"
    return load(write_run(tmp_path_factory.mktemp("sooner"), lines, topology, MANIFEST))


def test_row_of_one_run_by_hand(by_hand: Run) -> None:
    (row,) = comparison.compare([by_hand], 0.8)
    # From 10 % at 0 s to 85 % at 5 s, with version 2, in which are two updates of 2600 bytes.
    assert row.time.mean == pytest.approx(5 * 0.7 / 0.75)
    assert row.resolution == 5.0
    assert (row.rounds.mean, row.updates.mean, row.bytes.mean) == (2.0, 2.0, 5200.0)
    assert (row.accuracy.mean, row.loss.mean) == (0.8, 1.1)  # of the last evaluation
    assert (row.name, row.runs, row.reached, row.speed_up) == ("fedbuff", 1, 1, 1.0)
    assert isnan(row.time.low)


def _seeds(*runs: Run) -> list[Run]:
    """Runs that differ in their seed."""
    return [
        replace(run, topology={**run.topology, "seed": seed}) for seed, run in enumerate(runs, start=1)
    ]


def test_seeds_share_a_row(by_hand: Run, sooner: Run) -> None:
    (row,) = comparison.compare(_seeds(by_hand, sooner, sooner), 0.85)
    # Mean of 5, 3 and 3 s, and t(0.975, 2) × 1.1547 ÷ √3 = 4.302653 × 2 ÷ 3.
    assert row.time.mean == pytest.approx(11 / 3)
    assert row.time.high - row.time.mean == pytest.approx(2.868435, abs=1e-5)
    headings, ((name, runs, time, resolution, *_),) = comparison.texts([row])
    assert headings[:4] == ["", "runs", "time s", "resolution s"]
    assert (name, runs, time, resolution) == ("fedbuff", "3", "3.7 ± 2.9", "5.0")
    assert "± is half the width of the 95% interval" in comparison.caption([row], given=True)


def test_two_seeds_have_no_interval(by_hand: Run, sooner: Run) -> None:
    (row,) = comparison.compare(_seeds(by_hand, sooner), 0.85)
    assert (row.time.mean, isnan(row.time.low), isnan(row.accuracy.high)) == (4.0, True, True)
    assert comparison.texts([row])[1][0][:3] == ["fedbuff", "2", "4.0"]
    assert "±" not in comparison.caption([row], given=True)


def test_runs_that_miss_the_target_are_censored(by_hand: Run, sooner: Run) -> None:
    """85 % after 3, 3 and 5 s; one run breaks off after 4 s, and one ends after 10 s, without it."""
    early = by_hand.evaluations.assign(at=[0.0, 2.0, 4.0], accuracy=0.5)
    short = replace(by_hand, evaluations=early, ended=None)
    long = replace(by_hand, evaluations=by_hand.evaluations.assign(accuracy=0.5))
    (row,) = comparison.compare(_seeds(by_hand, sooner, sooner, short, long), 0.85)
    assert (row.reached, row.runs, isnan(row.time.mean)) == (3, 5, True)
    # Kaplan–Meier: 3/5 are left at 3 s; half of these at 5 s, as one of the three was lost at 4 s.
    assert row.time.median == 5.0
    headings, (cells,) = comparison.texts([row])
    assert cells[headings.index("time s")] == "median 5.0"
    assert cells[headings.index("reached")] == "3 of 5"
    (row,) = comparison.compare(_seeds(by_hand, long, long), 0.85)
    assert (isnan(row.time.median), row.time.above) == (True, 10.0)
    assert comparison.texts([row])[1][0][2] == "median > 10.0"
    # One that ended with a model of 4 s has missed the target until 10 s.
    (row,) = comparison.compare(_seeds(by_hand, long, replace(short, ended=by_hand.ended)), 0.85)
    assert (isnan(row.time.median), row.time.above) == (True, 10.0)


def test_run_without_an_evaluation_does_not_hide_the_others(by_hand: Run) -> None:
    broken = replace(by_hand, evaluations=by_hand.evaluations[:0], ended=None)
    (row,) = comparison.compare(_seeds(by_hand, broken), 0.85)
    headings, (cells,) = comparison.texts([row])
    assert (cells[headings.index("time s")], cells[headings.index("reached")]) == (
        "median 5.0",
        "1 of 2",
    )


def test_speed_up_is_relative_to_the_first_row(
    by_hand: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = _good_at(2.5)
    topology = "name: by-hand\nrule: {name: fedasync}\n"
    other = load(write_run(tmp_path_factory.mktemp("other"), lines, topology, MANIFEST))
    assert [row.speed_up for row in comparison.compare([by_hand, other], 0.8)] == [1.0, 2.0]
    assert [row.speed_up for row in comparison.compare([other, by_hand], 0.8)] == [1.0, 0.5]
    chosen = comparison.compare([other, by_hand], 0.8, "fedbuff")
    assert [(row.baseline, row.speed_up) for row in chosen] == [("fedbuff", 2.0), ("fedbuff", 1.0)]


def _study(run: Run, *cells: tuple[str, float, float, float]) -> list[Run]:
    """Runs of a rule with a Dirichlet α and a learning rate that reach 85 % after some seconds."""
    return [
        replace(
            run,
            topology={
                "name": "study",
                "rule": {"name": rule, **({"buffer_size": 3} if rule == "fedbuff" else {})},
                "task": {
                    "partition": {"scheme": "dirichlet", "alpha": alpha, "self_balancing": False},
                    "local": {"lr": lr},
                },
            },
            evaluations=run.evaluations.assign(at=[0.0, seconds, 20.0]),
        )
        for rule, alpha, lr, seconds in cells
    ]


def test_speed_up_is_relative_to_the_baseline_of_the_same_setting(by_hand: Run) -> None:
    runs = _study(
        by_hand,
        ("fedavg", 0.1, 0.06, 12.0),
        ("fedbuff", 0.1, 0.06, 6.0),
        ("fedavg", 0.5, 0.06, 8.0),
        ("fedbuff", 0.5, 0.06, 2.0),
        ("fedbuff", 0.5, 0.1, 1.0),
    )
    rows = comparison.compare(runs, 0.85)
    assert [row.name for row in rows] == [
        "fedavg dirichlet 0.1, lr 0.06",
        "fedbuff dirichlet 0.1, lr 0.06",
        "fedavg dirichlet 0.5, lr 0.06",
        "fedbuff dirichlet 0.5, lr 0.06",
        "fedbuff dirichlet 0.5, lr 0.1",
    ]
    assert rows[3].settings == {"rule": "fedbuff", "partition": "dirichlet 0.5", "lr": "lr 0.06"}
    assert [row.speed_up for row in rows[:4]] == [1.0, 2.0, 1.0, 4.0]
    assert (rows[3].baseline, rows[4].baseline) == ("fedavg dirichlet 0.5, lr 0.06", "")
    assert isnan(rows[4].speed_up)  # no fedavg with this learning rate
    chosen = comparison.compare(runs, 0.85, "dirichlet 0.1")
    assert [row.speed_up for row in chosen[:4]] == [1.0, 1.0, 1.5, 3.0]
    one = comparison.compare(runs, 0.85, "fedbuff, dirichlet 0.5, lr 0.1")
    assert [row.speed_up for row in one] == [1 / 12, 1 / 6, 1 / 8, 1 / 2, 1.0]
    assert [row.speed_up for row in comparison.compare(runs, 0.85, one[-1].name)] == [
        row.speed_up for row in one
    ]
    with pytest.raises(
        ValueError, match="found 'fedprox', expected one of fedavg, fedbuff, dirichlet 0"
    ):
        comparison.compare(runs, 0.85, "fedprox")


def test_rows_are_never_named_by_run_ids(by_hand: Run) -> None:
    many = [
        replace(by_hand, topology={"rule": {"name": "fedavg"}, "a": n, "b": n, "c": n, "d": n % 2})
        for n in range(3)
    ]
    assert [row.name for row in comparison.compare(many, None)] == [
        "fedavg a 0", "fedavg a 1", "fedavg a 2"
    ]  # fmt: skip
    code = [replace(by_hand, manifest={**by_hand.manifest, "code": code}) for code in ("abcdef1", "12")]
    assert [row.name for row in comparison.compare(code, None)] == [
        "fedbuff code abcdef", "fedbuff code 12"
    ]  # fmt: skip


def test_table_of_a_paper_is_csv_markdown_or_latex(by_hand: Run, sooner: Run) -> None:
    missed = replace(by_hand, evaluations=by_hand.evaluations.assign(accuracy=0.5))
    missed = replace(missed, topology={"rule": {"name": "own_rule"}})
    rows = comparison.compare([*_seeds(by_hand, sooner, sooner), missed], 0.85)
    latex = TABLE_FORMATS[".tex"](rows, True)
    lines = latex.splitlines()
    assert lines[0].startswith("% Needed to reach a test accuracy of 85%; ")
    assert lines[2:5] == [
        r"\begin{tabular}{lrrrrrrrrrr}",
        r"\toprule",
        r" & runs & time s & resolution s & rounds & updates & MB up & speed-up & final accuracy \% "
        r"& final loss & reached \\",
    ]
    assert lines[6].startswith(r"fedbuff & 3 & 3.7 $\pm$ 2.9 & 5.0 & 2 $\pm$ 0 & 2 $\pm$ 0 & ")
    assert lines[7].startswith(
        r"own\_rule & 1 & $>$ 10.0 & -- & $>$ 3 & $>$ 3 & $>$ 0.01 & -- & 50.0 & "
    )
    markdown = TABLE_FORMATS[".md"](rows, True).splitlines()
    assert markdown[1].startswith("| :-- | --: | ")
    assert markdown[2].startswith("| fedbuff | 3 | 3.7 ± 2.9 | 5.0 | ")
    assert markdown[-1] == comparison.caption(rows, given=True)
    table = pd.read_csv(io.StringIO(TABLE_FORMATS[".csv"](rows, True)))
    assert table["name"].tolist() == ["fedbuff", "own_rule"]
    assert table["time_mean"].tolist() == pytest.approx([11 / 3, nan], nan_ok=True)
    assert table["time_above"].tolist() == pytest.approx([nan, 10.0], nan_ok=True)
    assert table["settings_rule"].tolist() == ["fedbuff", "own_rule"]


def test_runs_of_different_tasks_are_not_compared(
    by_hand: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    topology = "name: b\ntask: {name: other}\nrule: {name: fedasync}\nstop: {after: 5s}\n"
    other = load(write_run(tmp_path_factory.mktemp("other"), _good_at(2.5), topology, MANIFEST))
    rows = comparison.compare([by_hand, other], 0.8)
    assert [(row.task, row.speed_up) for row in rows] == [("?", 1.0), ("other", 1.0)]
    assert "task" in comparison.texts(rows)[0]
    assert list(comparison.by_task([by_hand, other])) == ["?", "other"]
    (remark,) = comparison.remarks([by_hand, other])
    assert remark.startswith("The runs learn different tasks (?, other)")


def test_runs_with_different_stop_conditions_are_marked(by_hand: Run) -> None:
    stops = [{"after": "5s", "target_accuracy": None}, {"after": None, "target_accuracy": 0.8}]
    runs = [replace(by_hand, topology={**by_hand.topology, "stop": stop}) for stop in stops]
    (remark,) = comparison.remarks(runs)
    assert "(after 5s; target_accuracy 0.8)" in remark
    assert comparison.remarks(runs[:1]) == []


def test_unfinished_runs_are_marked(by_hand: Run, directory: Path) -> None:
    assert comparison.remarks([by_hand]) == []
    for lines in (EVENTS[:-1], [*EVENTS[:-1], EVENTS[-1].replace("after", "interrupted")]):
        write_run(directory, lines, "rule: {name: fedasync}\n", MANIFEST)
        (told,) = comparison.remarks([by_hand, load(directory)])
        assert told.startswith("Not finished: fedasync. ")


def test_reduced_run_compares_like_the_full_run(by_hand: Run, sooner: Run) -> None:
    whole = [by_hand, sooner]
    slim = [comparison.slim(run) for run in whole]
    for target in (None, 0.8):
        assert repr(comparison.compare(slim, target)) == repr(comparison.compare(whole, target))
    assert comparison.common_target(slim) == comparison.common_target(whole)
    assert comparison.remarks(slim) == comparison.remarks(whole)
    assert (len(slim[0].updates.columns), len(slim[0].telemetry)) == (3, 0)


def test_runs_changed_by_hand_are_noted(directory: Path) -> None:
    change = Acted(7.5, "slow", "scenario", 0.0, {"action": "set", "cpu": 0.1})
    assert comparison.remarks([with_records(directory, change)]) == []
    changed = with_records(directory, replace(change, source="hand"))
    (told,) = comparison.remarks([changed])
    assert told.startswith("Changed by hand during the run: fedbuff. ")


def test_runs_of_an_older_sweep_version_are_a_separate_row(by_hand: Run) -> None:
    """Data files beside the topology were changed, and the sweep run again."""
    cell = {**by_hand.manifest, "label": "slow link", "runtime": "process"}
    seeds = [
        replace(
            by_hand,
            path=Path("study", f"{files}-{seed}"),
            manifest={**cell, "data_files": files},
            topology={**by_hand.topology, "seed": seed},
        )
        for files, seed in (("old", 1), ("old", 2), ("new", 1))
    ]
    assert [row.runs for row in comparison.compare(seeds, None)] == [2, 1]
    (told,) = comparison.remarks(seeds)
    assert told.startswith("Several rows belong to slow link: settings, user code or data files changed")
    assert comparison.remarks(seeds[:2]) == []
    elsewhere = replace(seeds[2], path=Path("other", "new-1"))
    assert comparison.remarks([*seeds[:2], elsewhere]) == []


def test_repeated_seed_in_virtual_time_is_noted(by_hand: Run) -> None:
    virtual = {key: value for key, value in by_hand.manifest.items() if key not in ("validity", "cpus")}
    runs = [replace(by_hand, manifest=virtual, topology={**by_hand.topology, "seed": s}) for s in (1, 2)]
    assert comparison.remarks(runs) == []
    (told,) = comparison.remarks([*runs, runs[0]])
    assert told.startswith("Runs of fedbuff have the same seed")
    emulated = [replace(one, manifest={**virtual, "cpus": {}}) for one in (runs[0], runs[0])]
    assert comparison.remarks(emulated) == []


def test_default_target_is_the_highest_reached_by_all(by_hand: Run, sooner: Run) -> None:
    assert comparison.common_target([by_hand, sooner]) == 0.85
    assert comparison.common_target([]) is None


def test_runs_that_were_not_judged_are_counted_separately(tmp_path: Path) -> None:
    verdicts = [False, None, True]
    runs = []
    for seed, valid in enumerate(verdicts):
        folder = tmp_path / str(seed)
        folder.mkdir()
        manifest = MANIFEST | {"validity": {"valid": valid}, "repeats": 2 if seed == 0 else 0}
        topology = f"name: a\nseed: {seed}\nrule: {{name: fedavg}}\n"
        runs.append(load(write_run(folder, EVENTS, topology, manifest)))
    (row,) = comparison.compare(runs, 0.8)
    assert (row.valid, row.not_judged, row.repeats) == (1, 1, 2)
    headings, (cells,) = comparison.texts([row])
    assert (headings[-2:], cells[-2:]) == (["valid", "repeats"], ["1 of 3, 1 not judged", "2"])
    assert story.story(runs)[1].title == "fedavg (not valid: 1, not judged: 1 of 3 runs)"


def test_loss_is_compared_without_an_accuracy(tmp_path: Path) -> None:
    lines = [line.replace('"accuracy":0.', '"accuracy":null,"was":0.') for line in EVENTS]
    run = load(write_run(tmp_path, lines, "name: q\nrule: {name: fedavg}\n", MANIFEST))
    assert comparison.common_target([run]) is None
    assert comparison.texts(comparison.compare([run], None)) == (
        ["", "runs", "final loss"],
        [["fedavg", "1", "1.100"]],
    )


@pytest.mark.parametrize(("share", "text"), [(0.8, "80%"), (0.975, "97.5%"), (1.0, "100%")])
def test_percentages_are_formatted(share: float, text: str) -> None:
    assert comparison.percent(share) == text

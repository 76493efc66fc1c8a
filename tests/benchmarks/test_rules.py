"""The benchmark of asynchronous rules: ranks, a tiny benchmark from runs to page, and what is kept."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rules import ranks, report, results
from benchmarks.rules.__main__ import PAGES, main
from benchmarks.rules.definition import FOLDER, Benchmark, Condition, load
from benchmarks.rules.results import Cell
from benchmarks.rules.running import chosen, neighbours
from testbed import sweeps
from testbed.errors import BadInputError
from testbed.run.options import Options

CONDITIONS = (Condition("digits", "equal", "none"), Condition("digits", "equal", "strong"))


def scored(
    costs: list[list[list[float]]], reached: list[list[list[bool]]] | None = None
) -> ranks.Scores:
    """Costs by condition, rule and seed."""
    made = np.array(costs)
    all_reached = np.ones(made.shape, bool) if reached is None else np.array(reached)
    rules = tuple("abcd"[: made.shape[1]])
    return ranks.Scores(CONDITIONS[: len(costs)], rules, made, all_reached)


def cell(rule: str, seed: int, step: float = 1, **figures: float | bool | str) -> Cell:
    known: dict[str, object] = {
        "version": 1,
        "task": "digits",
        "fleet": "equal",
        "skew": "none",
        "reached": True,
        "seconds": 2.0,
        "updates": 30.0,
        "bytes": 3000.0,
        "joules": 12.5,
        "accuracy": 0.9,
        "events": "0123456789ab",
        "torch": "2.13.0",
    }
    return Cell(rule=rule, seed=seed, step=step, **(known | figures))  # type: ignore[arg-type]


class TestRanks:
    def test_mean_ranks_over_conditions(self) -> None:
        found = scored([[[1.0], [2.0], [3.0]], [[5.0], [9.0], [4.0]]])
        assert found.ranks.tolist() == [[1, 2, 3], [2, 3, 1]]
        assert [one.mean for one in ranks.mean_ranks(found).values()] == [1.5, 2.5, 2]

    def test_runs_that_missed_the_target_share_the_last_ranks(self) -> None:
        found = scored([[[9.0], [1.0], [2.0]]], [[[True], [False], [False]]])
        assert found.ranks.tolist() == [[1, 2.5, 2.5]]

    def test_rules_are_ranked_by_their_mean_rank_over_seeds(self) -> None:
        """Ranks of a: 1, 1, 3; of b: 2, 2, 1; of c: 3, 3, 2. One slow run does not decide."""
        found = scored([[[1.0, 1, 99], [2, 2, 1], [3, 3, 2]]])
        assert found.ranks.tolist() == [[1.5, 1.5, 3]]

    def test_interval_covers_the_ranks_that_other_seeds_give(self) -> None:
        sure = ranks.mean_ranks(scored([[[1.0, 1, 1], [2, 2, 2]]]))["a"]
        assert (sure.low, sure.mean, sure.high) == (1, 1, 1)
        unsure = ranks.mean_ranks(scored([[[1.0, 1, 3], [2, 2, 2]]]))["a"]
        assert (unsure.low, unsure.mean, unsure.high) == (1, 1, 2)

    def test_critical_difference_is_that_of_nemenyi(self) -> None:
        """Demšar 2006: 4 classifiers on 14 data sets have a critical difference of 1.25 at 5 %."""
        order = np.array([[1.0, 2, 3, 4]] * 14)
        conditions = tuple(Condition("digits", str(number), "none") for number in range(14))
        found = ranks.Scores(conditions, tuple("abcd"), order[..., None], np.ones((14, 4, 1), bool))
        assert ranks.friedman(found).critical_difference == pytest.approx(1.25, abs=0.005)
        assert ranks.friedman(found).p < 1e-6
        assert isnan(ranks.friedman(scored([[[1.0], [2.0], [3.0]]])).p)

    def test_holm_compares_with_less_and_less_strict_levels(self) -> None:
        assert ranks.holm([0.04, 0.01, 0.02]) == [True, True, True]
        assert ranks.holm([0.04, 0.03, 0.01]) == [False, False, True]
        assert ranks.holm([0.02, 0.3]) == [True, False]

    def test_slower_rules_are_separable_if_all_seeds_agree(self) -> None:
        found = ranks.behind_fastest(scored([[[2.0, 2.1, 1.9], [1, 1, 1], [1.5, 0.9, 1.2]]]))
        assert list(found) == ["b", "c", "a"]
        assert found["a"].factor.mean == pytest.approx(2.0, abs=0.01)
        assert (found["a"].is_separable, found["c"].is_separable) == (True, False)


class TestStepSizes:
    def test_two_are_tried_beside_the_best(self) -> None:
        assert neighbours(0.1) == (0.033, 0.33)
        assert neighbours(10) == (3.3, 33)

    def test_reaching_the_target_comes_first_then_time_then_accuracy(self) -> None:
        slow, fast = cell("a", 1, 0.1, seconds=3.0), cell("a", 1, 1, seconds=2.0)
        missed = cell("a", 1, 10, seconds=30.0, reached=False, accuracy=0.5)
        worse = cell("b", 1, 1, seconds=30.0, reached=False, accuracy=0.4)
        better = cell("b", 1, 10, seconds=30.0, reached=False, accuracy=0.7)
        assert chosen([slow, missed, fast, worse, better]) == {"a": fast, "b": better}


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    kept = results.Results((cell("a", 2), cell("b", 2, 0.1, reached=False)), "fedcba", "today")
    results.write(kept, tmp_path / "digits.csv")
    assert results.read(tmp_path / "digits.csv") == kept
    assert results.read(tmp_path / "none.csv") is None
    (tmp_path / "other.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(BadInputError, match="has no results of the benchmark"):
        results.read(tmp_path / "other.csv")


def test_condition_is_finished_if_every_rule_has_every_seed() -> None:
    cells = [cell("a", 2), cell("a", 3), cell("b", 2)]
    assert results.complete(cells, [2, 3], ["a", "b"]) == set()
    assert results.complete(cells, [2], ["a", "b"]) == {CONDITIONS[0]}


BENCHMARK = """
version: 1
tasks: {tiny: {target: 30%, steps: [0.1, 1]}}
fleets: {equal: {devices: [{name: a, count: 3, gflops: 1, energy: {idle: 1W, core: 1W}}]}}
skews: {none: {task.partition: {scheme: iid}}, some: {task.partition: {scheme: dirichlet, alpha: 0.5}}}
rules: {fedavg: {rule: {name: fedavg}}, fedasync: {rule: {name: fedasync}}}
step_keys: {}
seeds: {tune: 1, compare: [2, 3]}
"""
TINY = """
name: benchmark-1-tiny
task: {name: digits-logreg, flops_per_step: 1e8, local: {steps: 5, batch_size: 16, lr: 0.1}}
rule: {name: fedavg}
devices: [{name: a, gflops: 1}]
evaluate: {every: 1s}
stop: {after: 3s}
runtime: {name: virtual}
"""
MINE = """
from dataclasses import dataclass

from agents.rules.fedasync import FedAsync


@dataclass(frozen=True)
class Mine(FedAsync):
    pass
"""


def test_tiny_benchmark_from_runs_to_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages, runs = tmp_path / "pages", tmp_path / "runs"
    pages.mkdir()
    (pages / "index.md").write_text("# Page\n\n<!-- begin tiny -->\n<!-- end tiny -->\n\nOurs.\n")
    (tmp_path / "benchmark.yaml").write_text(BENCHMARK)
    (tmp_path / "tiny.yaml").write_text(TINY)
    paths = ["--benchmark", str(tmp_path), "--pages", str(pages), "--runs", str(runs), "--jobs", "1"]
    assert main(["tiny", "--skew", "some", "--keep", *paths]) == 0
    first = capsys.readouterr()
    assert "tiny-equal-some: 4 runs" in first.err
    assert "1 of 2 conditions finished. Waiting: label skew none: equal." in first.out
    page = (pages / "index.md").read_text()
    assert "| rule | rank by time |" in page
    assert "![Mean ranks](tiny.png)" in page
    assert page.endswith("<!-- end tiny -->\n\nOurs.\n")
    assert (pages / "tiny.png").is_file()
    assert "| fedasync | " in (pages / "tiny.md").read_text()
    kept = results.read(pages / "tiny.csv")
    assert kept is not None
    assert {one.version for one in kept.cells} == {1}
    by_rule = {rule: [one for one in kept.cells if one.rule == rule] for rule in ("fedavg", "fedasync")}
    for own in by_rule.values():  # four step sizes with the seed that chooses, the best with the others
        assert sorted(one.seed for one in own) == [1, 1, 1, 1, 2, 3]

    assert main(["tiny", "--skew", "some", *paths]) == 0
    again = capsys.readouterr()
    assert "runs, into" not in again.err
    assert "12 of 12 runs have the same events as the kept results" in again.err

    elsewhere = tmp_path / "elsewhere" / "part"
    assert main(["tiny", "--skew", "none", *paths, "--runs", str(elsewhere)]) == 0
    whole = results.read(elsewhere / "tiny.csv")
    assert whole is not None
    half = [one for one in whole.cells if one.seed == 1]
    results.write(results.Results(tuple(half), whole.digest, "today"), elsewhere / "tiny.csv")
    capsys.readouterr()
    assert main(["tiny", "--from", str(elsewhere.parent), *paths, "--pages", str(tmp_path)]) == 0
    continued = capsys.readouterr()
    assert f"8 runs of tiny-equal-none from {elsewhere / 'tiny.csv'}" in continued.err
    assert "tiny-equal-none: 4 runs" in continued.err, "what is known is not repeated"
    assert "2 of 2 conditions finished." in continued.out
    ended = results.read(runs / "tiny.csv")
    assert ended is not None
    assert set(ended.cells) == {*whole.cells, *kept.cells}

    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text('mine: {code: mine.py, rule: {name: "mine:Mine"}}\n')
    assert main(["tiny", "--add", str(tmp_path / "mine.yaml"), *paths]) == 0
    added = capsys.readouterr()
    assert "tiny-equal-none" not in added.err, "others have no results under this condition"
    (line,) = [line for line in added.out.splitlines() if line.startswith("mine  ")][:1]
    assert line.split()[1].replace(".", "").isdigit()
    assert (pages / "index.md").read_text() == page

    (tmp_path / "benchmark.yaml").write_text(BENCHMARK.replace("30%", "40%"))
    assert main(["tiny", "--so-far", *paths]) == 2
    assert "results of another version of the benchmark" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits", "--so-far", "--from", "nowhere"], "there is no folder nowhere"),
        (["tiny"], "there is no task 'tiny', expected one of digits"),
        (["--fleet", "slow", "--so-far"], "there is no fleet 'slow', expected one of equal"),
    ],
)
def test_unknown_names_are_reported(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_rule_of_the_user_needs_a_new_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("fedbuff: {rule: {name: fedbuff, buffer_size: 6}}\n")
    assert main(["digits", "--add", str(tmp_path / "mine.yaml")]) == 2
    assert "has a rule fedbuff already" in capsys.readouterr().err


def plan(benchmark: Benchmark, task: str, rules: list[str], fleets: list[str], skews: list[str]) -> int:
    """Plan the runs; return their number. Raises BadInputError if a run is not possible."""
    runs = [(Condition(task, fleet, skew), rule) for fleet in fleets for skew in skews for rule in rules]
    variants = {
        f"{one.fleet} {one.skew} {rule}": benchmark.changes(one, rule, 0.1) for one, rule in runs
    }
    study = {"topology": f"{task}.yaml", "variants": variants}
    return len(sweeps.from_mapping(study, task, benchmark.folder, Options()).cells)


@pytest.mark.parametrize("task", load().file.tasks)
def test_all_runs_are_possible(task: str) -> None:
    file = load().file
    rules, fleets, skews = list(file.rules), list(file.fleets), list(file.skews)
    assert (len(rules), len(fleets), len(skews)) == (13, 5, 3)
    assert plan(load(), task, rules, fleets[:1], skews[:1]) == 13
    assert plan(load(), task, rules[:1], fleets, skews) == 15


def test_part_in_containers_is_possible() -> None:
    study = sweeps.load(FOLDER / "containers.yaml", Options(runtime="docker"))
    assert len(study.cells) == 18


@pytest.mark.parametrize("task", load().file.tasks)
def test_kept_results_are_those_of_this_version(task: str) -> None:
    """A change of the benchmark needs a new version, and new results."""
    benchmark = load()
    kept = results.read(PAGES / f"{task}.csv")
    page = (PAGES / "index.md").read_text(encoding="utf-8")
    if kept is None:
        assert report.filled_index(page, report.standing(benchmark, task, [])) == page
        return
    assert kept.digest == benchmark.digest(task)
    assert {one.version for one in kept.cells} == {benchmark.version}
    assert report.filled_index(page, report.standing(benchmark, task, kept.cells)) == page

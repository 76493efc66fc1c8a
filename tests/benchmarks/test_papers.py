"""The papers' sweeps and `python -m benchmarks.papers`. What the runs come to is not tested here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from analysis.load import load
from benchmarks.papers import honest, judging, report, results
from benchmarks.papers.__main__ import PAGES, SETS, main, pages
from benchmarks.papers.bench import SWEEPS, Bench
from benchmarks.papers.experiments import EXPERIMENTS, MEASURES, Claim, Experiment
from benchmarks.papers.honest import Verdict
from benchmarks.papers.results import Cell, Result
from testbed import sweeps, topology
from testbed.errors import BadInputError, RunFailedError
from testbed.run.options import Options
from testbed.sweeps import sweeping
from testbed.topology import yamlfile


class TestGrid:
    def test_best_step_inside_the_grid_ends_the_search(self) -> None:
        assert honest.step_to_try({0.1: 70, 0.3: 80, 1: 75}, 3) is None
        assert not honest.at_edge({0.1: 70, 0.3: 80, 1: 75})

    @pytest.mark.parametrize(
        ("scores", "next_step"),
        [
            ({0.1: 70, 0.3: 75, 1: 80}, 3),
            ({0.1: 80, 0.3: 75, 1: 70}, 0.03),
            ({0.1: 70, 1: 80}, 10),
            ({0.1: 80, 1: nan}, 0.01),
            ({0.1: nan, 1: nan, 10: nan}, 0.01),
        ],
    )
    def test_best_step_at_the_edge_extends_the_grid(
        self, scores: dict[float, float], next_step: float
    ) -> None:
        assert honest.step_to_try(scores, len(scores)) == next_step

    def test_inner_step_wins_a_tie(self) -> None:
        assert honest.best_step({0.1: 80, 0.3: 80, 1: 80}) == 0.3
        assert honest.step_to_try({0.1: 80, 0.3: 80, 1: 80}, 3) is None
        assert honest.best_step({0.1: 80, 1: 80}) == 0.1

    def test_grid_extensions_are_bounded(self) -> None:
        scores = {10.0**k: float(k) for k in range(3)}
        while (lr := honest.step_to_try(scores, 3)) is not None:
            scores[lr] = lr
        assert len(scores) == 3 + honest.EXTENSIONS
        assert honest.at_edge(scores)

    def test_largest_tolerated_step_is_searched_beyond_the_best(self) -> None:
        assert honest.step_beyond({0.1: 70, 0.3: 80, 1: 78}, 3, tolerance=2) == 3
        assert honest.step_beyond({0.1: 70, 0.3: 80, 1: 77.9}, 3, tolerance=2) is None
        assert honest.step_beyond({0.1: 80, 0.3: nan}, 2, tolerance=2) is None
        assert honest.step_beyond({10.0**k: 80 for k in range(7)}, 3, tolerance=2) is None

    def test_near_best_steps_are_run_with_all_seeds(self) -> None:
        scores = {0.1: 79.0, 0.3: 80, 1: 78.9, 3: nan}
        assert honest.near_best(scores, 1) == (0.3, 0.1)
        assert honest.near_best(scores, 2) == (0.3, 0.1, 1)
        assert honest.near_best({0.1: -9, 0.3: -9}, nan) == (0.1,)
        assert honest.near_best({0.1: nan, 0.3: nan}, 1) == (0.1,)

    def test_fixed_step_size_is_not_extended(self) -> None:
        assert not honest.at_edge({0.1: nan})
        assert honest.step_to_try({0.1: 80}, 1) is None


class TestVerdicts:
    @pytest.mark.parametrize(
        ("differences", "verdict"),
        [
            ([1.0, 1.1, 0.9], Verdict.HOLDS),
            ([-1.0, -1.1, -0.9], Verdict.FAILS),
            ([3.0, 0.1, -0.2], Verdict.OPEN),
            ([0.0, 0.0, 0.0], Verdict.OPEN),  # a tie
            ([0.5, 0.5, 0.5], Verdict.HOLDS),
            ([1.0, 1.0], Verdict.NOT_TESTED),
            ([], Verdict.NOT_TESTED),
            ([1.0, 1.1, nan], Verdict.NOT_TESTED),
        ],
    )
    def test_verdict_follows_the_confidence_interval(
        self, differences: list[float], verdict: Verdict
    ) -> None:
        theirs = dict.fromkeys(range(len(differences)), 80.0)
        ours = {seed: 80 + difference for seed, difference in enumerate(differences)}
        assert honest.judge(ours, theirs).verdict is verdict

    def test_differences_are_paired_by_seed(self) -> None:
        judged = honest.judge({1: 50, 2: 70, 3: 90}, {3: 89, 1: 49.1, 2: 68.9})
        assert judged.verdict is Verdict.HOLDS  # though seeds differ far more than rules
        with pytest.raises(ValueError, match="cannot be paired"):
            honest.judge({1: 50}, {2: 50})

    def test_all_of_several_baselines_must_be_beaten(self) -> None:
        holds, fails, open_ = (
            honest.judge(dict(enumerate(values)), dict.fromkeys(range(3), 0.0))
            for values in ([1, 1.1, 1.2], [-1, -1.1, -1.2], [1, -1, 0])
        )
        assert honest.together([holds, holds]).verdict is Verdict.HOLDS
        assert honest.together([holds, open_]) is open_
        assert honest.together([holds, open_, fails]) is fails

    def test_claim_must_hold_against_every_near_best_step(self) -> None:
        holds, fails, open_, few = (
            honest.judge(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
            for values in ([1, 1.1, 1.2], [-1, -1.1, -1.2], [1, -1, 0], [1, 1])
        )
        chosen, theirs, ours = (1.0, 0.1), (1.0, 0.3), (3.0, 0.1)
        assert honest.settled({chosen: holds}, chosen) == (chosen, holds)
        assert honest.settled({chosen: holds, ours: fails}, chosen) == (chosen, holds)
        assert honest.settled({chosen: fails, theirs: holds}, chosen) == (chosen, fails)
        for other in (fails, open_):
            steps, judged = honest.settled({chosen: holds, theirs: other}, chosen)
            assert (steps, judged.verdict) == (theirs, Verdict.OPEN)
            assert judged.reason == "it holds with step sizes 1 and 0.1"
        steps, judged = honest.settled({chosen: fails, ours: open_}, chosen)
        assert (steps, judged.verdict) == (ours, Verdict.OPEN)
        assert honest.settled({chosen: open_, theirs: holds}, chosen) == (chosen, open_)
        steps, judged = honest.settled({chosen: holds, theirs: few}, chosen)
        assert (steps, judged.verdict) == (theirs, Verdict.NOT_TESTED)
        assert judged.reason == "2 seeds compared, of at least 3, with step sizes 1 and 0.3"

    def test_claim_is_not_tested_in_another_regime(self) -> None:
        assert honest.not_the_papers(84.2, 9.8, 84.2) == ""
        assert honest.not_the_papers(79.2, 9.8, 84.2) == ""
        assert "in the paper 84.2 %: another regime" in honest.not_the_papers(79.1, 9.8, 84.2)
        assert "hardly more than the untrained" in honest.not_the_papers(14, 9.8)
        assert "hardly more" in honest.not_the_papers(nan, 9.8)

    def test_loss_above_the_untrained_models_is_reported(self) -> None:
        assert honest.not_learned(2.0, 2.303) == ""
        assert "hardly less" in honest.not_learned(2.27, 2.303)
        assert "diverged" in honest.not_learned(2.45, 2.303)
        assert "diverged" in honest.not_learned(nan, 2.303)


def cell(variant: str, seed: int, accuracy: float, lr: float = 0.3, **figures: float) -> Cell:
    known = Cell(
        variant=variant,
        lr=lr,
        seed=seed,
        accuracy=accuracy / 100,
        loss=1.0,
        untrained_accuracy=0.1,
        untrained_loss=2.303,
        reached=inf,
        ended=100.0,
        fall=0.0,
        updates=1000,
        seconds=3.0,
        manifest="0123456789ab",
    )
    return replace(known, **figures)  # type: ignore[arg-type]


EXPERIMENT = Experiment(
    "tiny",
    "area",
    "A | B",
    "accuracy",
    (
        Claim("A is more accurate than B", "A", ("B",), "88.0 / 84.2", 84.2),
        Claim("A tolerates larger step sizes", "A", ("B",), figure="tolerance"),
    ),
)


def result(a: float, b: float, seeds: int = 4) -> Result:
    """Step size 0.3 is best for both; A tolerates 1 too."""
    cells = []
    for seed in range(1, seeds + 1):
        for lr, worse_a, worse_b in ((0.1, 4, 4), (0.3, 0, 0), (1, 1, 9), (3, 9, 19)):
            cells += [cell("A", seed, a - worse_a + 0.01 * seed, lr)]
            cells += [cell("B", seed, b - worse_b, lr)]
    return Result(tuple(cells), "2026-11-23", 2)


class TestJudging:
    def test_claims_are_judged_on_seeds_that_chose_no_step(self) -> None:
        better, tolerated = judging.rows(EXPERIMENT, result(88, 85))
        assert (better.verdict, better.seeds) == (Verdict.HOLDS, 3)
        assert better.ours == "88.0 (0.3) / 85.0 (0.3) (B)"
        assert better.difference.startswith("+3.0 (")
        assert (tolerated.verdict, tolerated.difference) == (Verdict.HOLDS, "×3.3 (×3.3 to ×3.3)")

    def test_tolerance_uses_seeds_that_ran_the_whole_grid(self) -> None:
        """Other seeds ran only near-best step sizes, so their tolerance is not known."""
        whole = result(88, 85, seeds=3)
        more = [cell(name, seed, 85, lr) for name in "AB" for seed in (4, 5) for lr in (0.1, 0.3)]
        _, tolerated = judging.rows(EXPERIMENT, replace(whole, cells=(*whole.cells, *more)))
        assert (tolerated.seeds, tolerated.difference) == (3, "×3.3 (×3.3 to ×3.3)")

    def test_near_best_step_of_the_baseline_can_revoke_a_verdict(self) -> None:
        """The seed that chooses prefers 0.1 for B by half a point; on the others 0.3 is as good as A."""
        steps: dict[str, dict[float, float]] = {
            "A": {0.1: 85, 0.3: 88, 1: 86},
            "B": {0.01: 80, 0.1: 87.5, 0.3: 87, 1: 80},
        }
        cells = [cell(rule, 1, score, lr) for rule in steps for lr, score in steps[rule].items()]
        for seed, (a, b, near) in enumerate([(88, 86, 88), (89, 86.5, 88.5), (88, 86, 88.4)], start=2):
            cells += [cell("A", seed, a), cell("B", seed, b, 0.1), cell("B", seed, near)]
        better, _ = judging.rows(EXPERIMENT, Result(tuple(cells), "2026-11-23", 2))
        assert (better.verdict, better.reason) == (
            Verdict.OPEN,
            "it holds with step sizes 0.3 and 0.1",
        )
        assert better.ours == "88.3 (0.3) / 88.3 (0.3) (B)"
        assert [
            (one.variant, one.lr, one.chosen)
            for one in judging.lines(EXPERIMENT, Result(tuple(cells), "", 2))
        ] == [("A", 0.3, True), ("B", 0.1, True), ("B", 0.3, False)]
        uncompared = [one for one in cells if (one.variant, one.lr, one.seed) != ("B", 0.3, 4)]
        better, _ = judging.rows(EXPERIMENT, Result(tuple(uncompared), "2026-11-23", 2))
        assert (better.verdict, better.seeds) == (Verdict.NOT_TESTED, 2)

    def test_baseline_in_another_regime_leaves_the_claim_open(self) -> None:
        better, _ = judging.rows(EXPERIMENT, result(88, 70))
        assert better.verdict is Verdict.NOT_TESTED
        assert "another regime" in better.reason

    def test_best_step_at_the_edge_leaves_the_claim_open(self) -> None:
        found = result(88, 85)
        edge = [one for one in found.cells if not (one.variant == "B" and one.lr < 0.3)]
        better, _ = judging.rows(EXPERIMENT, replace(found, cells=tuple(edge)))
        assert better.verdict is Verdict.NOT_TESTED
        assert "best step size of B, 0.3, is the edge" in better.reason

    def test_too_few_seeds_leave_the_claim_open(self) -> None:
        assert judging.rows(EXPERIMENT, result(88, 85, seeds=3))[0].verdict is Verdict.NOT_TESTED
        assert judging.rows(EXPERIMENT, result(88, 85, seeds=1))[0].verdict is Verdict.NOT_TESTED
        assert {row.verdict for row in judging.rows(EXPERIMENT, None)} == {Verdict.NOT_RUN}
        alone = Result((cell("A", 1, 80),), "2026-11-23", 2)
        assert judging.rows(EXPERIMENT, alone)[0].reason == "no runs of B"

    def test_unreached_target_leaves_the_claim_open(self) -> None:
        timed = Experiment("t", "fedfa", "T", "time", (Claim("A is sooner", "A", ("B",)),), target=0.6)
        never = [cell(variant, seed, 50) for variant in "AB" for seed in range(1, 5)]
        (row,) = judging.rows(timed, Result(tuple(never), "2026-11-23", 2))
        assert (row.verdict, row.reason) == (
            Verdict.NOT_TESTED,
            "none has reached 60% on the seeds that compare",
        )
        first = [replace(one, reached=50.0) if one.seed == 1 else one for one in never]
        (row,) = judging.rows(timed, Result(tuple(first), "2026-11-23", 2))
        assert (row.verdict, row.difference) == (Verdict.NOT_TESTED, "+0.0 (+0.0 to +0.0)")
        some = [one if one.variant == "B" else replace(one, reached=50.0 + one.seed) for one in never]
        (row,) = judging.rows(timed, Result(tuple(some), "2026-11-23", 2))
        assert (row.verdict, row.ours) == (Verdict.HOLDS, "53.0 (0.3) / 100.0 (0.3) (B)")

    def test_step_without_the_target_is_ranked_by_accuracy_below_the_others(self) -> None:
        timed = Experiment("t", "fedfa", "T", "time", (Claim("A is sooner", "A", ("B",)),), target=0.6)
        sooner = [cell("B", 1, 65, lr, reached=50.0 + abs(lr - 0.3)) for lr in (0.1, 0.3, 1)]
        for accuracies, reason in (
            ((9, 8, 10), "of A, 0.3, is the edge"),  # all diverge: below
            ((20, 30, 40), "of A, 1, is the edge"),
            ((20, 30, 25), "0 seeds compared"),
            ((20, 15, 9), "of A, 0.1, is the edge"),
        ):
            steps = (0.1, 0.3, 1)
            slow = [cell("A", 1, x, lr) for x, lr in zip(accuracies, steps, strict=True)]
            (row,) = judging.rows(timed, Result((*slow, *sooner), "2026-11-23", 2))
            assert row.verdict is Verdict.NOT_TESTED
            assert reason in row.reason
            assert row.ours.startswith("100.0 ("), "seconds, with nothing added"

    def test_lower_losses_are_better(self) -> None:
        lossy = Experiment("l", "fedfix", "L", "loss", (Claim("A is lower", "A", ("B",)),))
        cells = [
            cell("AB"[b], seed, 50, loss=1.0 + b + 0.01 * seed * b) for b in (0, 1) for seed in range(4)
        ]
        (row,) = judging.rows(lossy, Result(tuple(cells), "2026-11-23", 2))
        assert row.verdict is Verdict.HOLDS
        assert row.difference == "-1.020 (-1.045 to -0.995)"
        diverged = [replace(one, loss=2.5) if one.variant == "B" else one for one in cells]
        (row,) = judging.rows(lossy, Result(tuple(diverged), "2026-11-23", 2))
        assert "above the untrained model's 2.303: diverged" in row.reason
        starved = [replace(one, valid=(one.variant, one.seed) != ("B", 2)) for one in cells]
        (row,) = judging.rows(lossy, Result(tuple(starved), "2026-11-23", 2))
        assert row.verdict is Verdict.NOT_TESTED
        assert row.reason == "devices did not have what was asked for in 1 of the runs"


TINY = """
topology: base.yaml
variants:
  A: {rule: {name: fedavg}}
  B: {rule: {name: fedbuff, buffer_size: 2}}
grid: {task.local.lr: [0.1, 0.3], seed: [1, 2, 3, 4]}
"""
BASE = """
name: tiny
task: {name: digits-logreg, local: {steps: 2, batch_size: 16, lr: 0.1}}
rule: {name: fedavg}
devices: [{name: a, count: 2, timing: 1s}]
evaluate: {every: 2s}
stop: {after: 4s}
runtime: {name: virtual}
"""


def test_page_is_made_from_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "area.md").write_text("# AREA\n\n<!-- begin tiny -->\n<!-- end tiny -->\n\nOurs.\n")
    told: list[str] = []
    bench = Bench(tmp_path / "runs", None, told.append, files=tmp_path, jobs=1)
    experiment = replace(EXPERIMENT, claims=EXPERIMENT.claims[:1])  # whole grids take longer
    assert bench.so_far(experiment) is None
    done = bench.run(experiment)
    tuned = {one.lr for one in done.cells if one.variant == "A" and one.seed == 1}
    assert {0.1, 0.3} <= tuned
    assert len(tuned) <= 2 + honest.EXTENSIONS
    assert {one.seed for one in done.cells} == {1, 2, 3, 4}
    told.clear()
    assert {replace(one, seconds=0) for one in bench.run(experiment).cells} == {
        replace(one, seconds=0) for one in done.cells
    }
    assert all("begin" not in line for line in told), "what is done is run again"
    kept = tmp_path / "tiny.json"
    so_far = bench.so_far(experiment)
    assert so_far is not None
    assert set(so_far.cells) == set(done.cells)
    (tmp_path / "base.yaml").write_text(BASE.replace("after: 4s", "after: 3s"))
    assert bench.so_far(experiment) is None, "runs of a former version of the sweep are taken in"
    results.write(so_far, kept)
    again = results.read(kept)
    assert again is not None
    assert judging.rows(experiment, again) == judging.rows(experiment, done)
    pages([experiment], tmp_path)
    page = (tmp_path / "area.md").read_text()
    pages([experiment], tmp_path)
    assert (tmp_path / "area.md").read_text() == page
    assert "| A is more accurate than B | 88.0 / 84.2 |" in page
    assert page.endswith("\n\nOurs.\n")
    with pytest.raises(BadInputError, match="no place for other"):
        report.filled(page, "other", "")


def test_step_sizes_are_chosen_in_virtual_time(tmp_path: Path) -> None:
    smallest = TINY.replace("[0.1, 0.3], seed: [1, 2, 3, 4]", "[0.1], seed: [1, 2]")
    (tmp_path / "tiny.yaml").write_text(smallest.replace("  B: ", "# B: "))
    base = BASE.replace("after: 4s", "after: 1s").replace("timing: 1s", "timing: 0.2s, cpu: 0.3")
    base += "virtual: {step_time: 1ms}\n"  # else it would be measured, for some seconds
    (tmp_path / "base.yaml").write_text(base)
    bench = Bench(tmp_path / "runs", None, print, files=tmp_path, jobs=1)
    done = bench.run(replace(EXPERIMENT, claims=(), runtime="process"))
    index = sweeping.Index.read(tmp_path / "runs" / "tiny")
    runs = [load(tmp_path / "runs" / "tiny" / str(cell["run"])) for cell in index.cells.values()]
    made = {(run.topology["seed"], run.topology["runtime"]["name"]) for run in runs}
    assert made == {(1, "virtual"), (2, "process")}
    assert {one.seed for one in done.cells} == {1, 2}


def test_tolerance_extends_the_grid_for_each_of_its_seeds(tmp_path: Path) -> None:
    """With seed 1 a step size of 1 costs 20 points, with seed 3 only one: whether 3 is tolerated has to
    be tried with all three seeds. Seed 4 only compares the best step size."""

    class Recorded(Bench):
        def _cells(self, *arguments: Any) -> list[Cell]:
            _, _, steps, seeds, _ = arguments
            costs = {0.1: 4, 0.3: 0, 1: 20, 3: 40}
            return [
                cell(variant, seed, 80 - (1 if (seed, lr) == (3, 1) else costs[lr]), lr)
                for variant, own in steps.items()
                for lr in own
                for seed in seeds
            ]

    (tmp_path / "tiny.yaml").write_text(TINY.replace("[0.1, 0.3]", "[0.1, 0.3, 1]"))
    done = Recorded(tmp_path / "runs", None, print, files=tmp_path).run(EXPERIMENT)
    tried = [set(done.of_seed("A", seed, lambda one: one.accuracy)) for seed in (1, 2, 3, 4)]
    assert tried == [{0.1, 0.3, 1, 3}] * 3 + [{0.3}]


def test_invalid_sweep_is_reported(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    bench = Bench(tmp_path / "runs", None, print, files=tmp_path, jobs=1)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("task.local.lr", "task.local.steps"))
    with pytest.raises(BadInputError, match=r"grid has no task\.local\.lr"):
        bench.run(EXPERIMENT)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("[1, 2, 3, 4]", "[2, 1]"))
    with pytest.raises(BadInputError, match="expected ascending"):
        bench.run(EXPERIMENT)
    (tmp_path / "tiny.yaml").write_text(TINY)
    greedy = "task: {partition: {scheme: dirichlet, alpha: 0.1, min_samples: 9999}, "
    (tmp_path / "base.yaml").write_text(BASE.replace("task: {", greedy))
    with pytest.raises(RunFailedError, match="4 of 4 runs of tiny failed"):
        bench.run(replace(EXPERIMENT, claims=()))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_experiments_name_variants_of_their_sweep(experiment: Experiment) -> None:
    """Its runs are also valid on the sweep's own runtime, and its page has everything that is stored."""
    study = yamlfile.read(SWEEPS / experiment.file).data
    named = {name for claim in experiment.claims for name in (claim.ours, *claim.others)}
    assert named <= set(study["variants"])
    assert len(study["grid"]["seed"]) > honest.SEEDS
    base = topology.load(SWEEPS / study["topology"])
    assert base.runtime.name == ("docker" if experiment.file.endswith("-fleet.yaml") else "virtual")
    first = {path: values[:1] for path, values in study["grid"].items()}
    read = sweeps.from_mapping({**study, "grid": first}, experiment.name, SWEEPS, Options())
    assert [one.variant for one in read.cells] == list(study["variants"])
    assert read.target == experiment.target
    assert experiment.figure in MEASURES
    kept = results.read(PAGES / f"{experiment.name}.json")
    page = (PAGES / f"{experiment.paper}.md").read_text(encoding="utf-8")
    assert report.filled(page, experiment.name, report.markdown(experiment, kept)) == page


def test_missing_data_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.papers", "area", "--data", str(tmp_path)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert ended.returncode == 2
    assert all(word in ended.stderr for word in ("ylecun/mnist", "TESTBED_DATA"))


def test_unknown_set_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["papers", "fredprox"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"expected one of {', '.join(SETS)}" in capsys.readouterr().err

"""Which asynchronous rule when? The benchmark in topologies/benchmark, in virtual time.

    python -m benchmarks.rules [TASK ...] [--fleet F ...] [--skew S ...] [--runs FOLDER] [--data FOLDER]
                               [--jobs N] [--on CLUSTER] [--from FOLDER ...] [--so-far] [--keep]
    python -m benchmarks.rules TASK --add mine.yaml

Without TASK, all tasks. Runs are kept in --runs, their figures in TASK.csv there, and finished ones are
not repeated, so that the benchmark can be interrupted. --on spreads them over a cluster, as
`testbed sweep --on` does. --from takes in results of this or another machine: each TASK.csv in FOLDER
and in folders in it. --so-far runs nothing. --keep also writes results, chart and tables into
docs/benchmark.

--add FILE runs the rules in FILE alone, and shows them among the kept results of the others. FILE has
rules by name, as `rules` in topologies/benchmark/benchmark.yaml; own code is named by `code`, as in a
topology: `mine: {code: mine.py, rule: {name: "mine:Mine"}}`.

The tasks but digits need MNIST, CIFAR-10 and Shakespeare, as parquet files under --data (or
TESTBED_DATA) in the layout of the Hugging Face hub, or from the hub itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from rich.console import Console

from agents.texts import quantity
from benchmarks.command import exit_code_of
from benchmarks.papers.report import LINE
from benchmarks.rules import report, results
from benchmarks.rules.definition import FOLDER, Benchmark, Condition, load, read_rules
from benchmarks.rules.results import Cell, Results
from benchmarks.rules.running import Runner
from testbed.errors import BadInputError
from testbed.sweeps import clusters

PAGES = Path(__file__).parents[2] / "docs" / "benchmark"
RUNS = Path("runs") / "benchmark"


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    return exit_code_of(lambda: _run(asked))


def _run(asked: argparse.Namespace) -> None:
    added = read_rules(asked.add) if asked.add else {}
    benchmark = load(asked.benchmark, added)
    data = asked.data or (Path(os.environ["TESTBED_DATA"]) if "TESTBED_DATA" in os.environ else None)
    runner = Runner(benchmark, asked.runs, data, _say, jobs=asked.jobs, on=asked.on)
    console = Console(highlight=False, markup=False)
    console.width = min(console.width, LINE) if console.is_terminal else LINE
    for task in _among("task", asked.tasks, benchmark.file.tasks):
        conditions = [
            condition
            for condition in benchmark.conditions(task)
            if condition.fleet in _among("fleet", asked.fleet, benchmark.file.fleets)
            and condition.skew in _among("skew", asked.skew, benchmark.file.skews)
        ]
        kept = _read(asked.pages / f"{task}.csv", benchmark, task)
        if added:
            cells = _place(runner, benchmark, kept, conditions, list(added))
        else:
            file = asked.runs / f"{task}.csv"
            _take_in(asked.elsewhere, benchmark, task, file)
            cells = _collect(runner, benchmark, file, task, [] if asked.so_far else conditions)
            if kept:
                _say(_same_as_kept(cells, kept))
        found = report.standing(benchmark, task, cells)
        console.print(report.state(found))
        for table in report.tables(found):
            report.show(table, console, list(added))
        if asked.keep and not added:
            if done := [cell for cell in cells if cell.condition in found.conditions]:
                results.write(_dated(done, benchmark, task), asked.pages / f"{task}.csv")
            report.write_pages(found, asked.pages)


def _take_in(folders: Sequence[Path], benchmark: Benchmark, task: str, file: Path) -> None:
    """Add results in other files of `folders` to `file`. Of each condition, the file with the most runs
    counts. Raises BadInputError."""
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise BadInputError(f"there is no folder {missing[0]}")
    by_condition = _by_condition(_read(file, benchmark, task))
    for other in sorted(path for folder in folders for path in folder.rglob(f"{task}.csv")):
        for condition, cells in _by_condition(_read(other, benchmark, task)).items():
            if len(cells) > len(by_condition.get(condition, [])):
                by_condition[condition] = cells
                _say(f"{quantity(len(cells), 'run')} of {condition.name} from {other}")
    if folders:
        results.write(_dated(chain(*by_condition.values()), benchmark, task), file)


def _by_condition(cells: Iterable[Cell]) -> dict[Condition, list[Cell]]:
    found: dict[Condition, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.condition, []).append(cell)
    return found


def _collect(
    runner: Runner, benchmark: Benchmark, file: Path, task: str, conditions: list[Condition]
) -> list[Cell]:
    """Run those of `conditions` that are not finished in `file`; return all cells of the file."""
    rules, seeds = list(benchmark.file.rules), benchmark.file.seeds.compare
    by_condition = _by_condition(_read(file, benchmark, task))
    finished = results.complete(chain(*by_condition.values()), seeds, rules)

    for condition in [one for one in conditions if one not in finished]:
        own = by_condition.setdefault(condition, [])

        def keep(new: list[Cell], own: list[Cell] = own) -> None:
            own += new
            results.write(_dated(chain(*by_condition.values()), benchmark, task), file)

        runner.run(condition, rules, [*own], keep)
    return [*chain(*by_condition.values())]


def _place(
    runner: Runner, benchmark: Benchmark, kept: list[Cell], conditions: list[Condition], added: list[str]
) -> list[Cell]:
    """Run the rules `added` under those of `conditions` that are finished in the kept results; return
    the cells of all rules. Raises BadInputError."""
    others = [rule for rule in benchmark.file.rules if rule not in added]
    finished = results.complete(kept, benchmark.file.seeds.compare, others)
    if not (known := [condition for condition in conditions if condition in finished]):
        raise BadInputError("no results are kept for this: choose another task, fleet or skew")
    for condition in known:
        kept = kept + runner.run(condition, added)
    return kept


def _same_as_kept(cells: Iterable[Cell], kept: Iterable[Cell]) -> str:
    """Say how many runs are the same as the kept ones."""
    before = {(cell.condition, cell.rule, cell.step, cell.seed): cell.events for cell in kept}
    both = [
        cell.events == before[key]
        for cell in cells
        if (key := (cell.condition, cell.rule, cell.step, cell.seed)) in before
    ]
    return f"{sum(both)} of {quantity(len(both), 'run')} have the same events as the kept results"


def _read(path: Path, benchmark: Benchmark, task: str) -> list[Cell]:
    """Return the cells in `path`; none if there is no file. Raises BadInputError."""
    found = results.read(path)
    if found is not None and found.digest != benchmark.digest(task):
        raise BadInputError(
            f"{path} has results of another version of the benchmark: move it away, or name another "
            "folder with --runs"
        )
    return list(found.cells) if found else []


def _dated(cells: Iterable[Cell], benchmark: Benchmark, task: str) -> Results:
    return Results(tuple(cells), benchmark.digest(task), datetime.now(UTC).date().isoformat())


def _among(what: str, asked: list[str], known: Iterable[str]) -> list[str]:
    """Return `asked`, or all of `known`. Raises BadInputError."""
    if unknown := [name for name in asked if name not in set(known)]:
        raise BadInputError(f"there is no {what} {unknown[0]!r}, expected one of {', '.join(known)}")
    return asked or list(known)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rules")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="tasks; default: all")
    parser.add_argument("--fleet", action="append", default=[], help="fleet; default: all")
    parser.add_argument("--skew", action="append", default=[], help="label skew; default: all")
    parser.add_argument("--add", type=Path, metavar="FILE", help="your rules, to place among the others")
    parser.add_argument("--runs", type=Path, default=RUNS, help=f"folder of the runs (default: {RUNS})")
    parser.add_argument("--data", type=Path, help="folder of the datasets (TESTBED_DATA)")
    parser.add_argument("--jobs", type=int, help="runs at the same time (default: one per core)")
    parser.add_argument("--on", default=clusters.LOCAL, help="cluster, as in testbed sweep --on")
    parser.add_argument(
        "--from",
        dest="elsewhere",
        action="append",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="folder of results that were made elsewhere",
    )
    parser.add_argument("--benchmark", type=Path, default=FOLDER, help="folder of another benchmark")
    parser.add_argument("--pages", type=Path, default=PAGES, help="folder of the kept results")
    parser.add_argument("--keep", action="store_true", help="write results and page into docs/benchmark")
    parser.add_argument("--so-far", action="store_true", help="run nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())

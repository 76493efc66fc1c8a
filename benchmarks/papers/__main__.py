"""The papers' experiments in virtual time: our figures, and each published claim beside them.

    python -m benchmarks.papers [area] [fedfix] [defedavg] [fedfa] [--data FOLDER] [--runs FOLDER]
                                [--full | --so-far]

The sets are the experiments of the papers on AREA (Iakovidou & Kim), FedFix (Fraboni et al.), DeFedAvg
(Wang et al.) and FedFa (Xu et al.); without names, all of them. The fifth paper whose rule we have,
Toghani & Uribe 2022 on FedBuff, is theory and has no experiments. Each experiment is a sweep in
topologies/papers/sweeps.

Without an option, the experiments run that fit into 20 minutes on two cores at full scale; of the others
the last full result is shown. --full runs all of them (days), and after each writes results and tables
into docs/papers; --so-far writes those of the runs that are done in --runs. Runs are kept there, and
finished runs are not repeated.

They need MNIST, CIFAR-10 and Shakespeare, as parquet files under --data (or TESTBED_DATA) in the layout
of the Hugging Face hub, or from the hub itself. The exit code is 0 whether or not the claims hold, and 2
if the data is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.command import exit_code_of
from benchmarks.papers import report, results
from benchmarks.papers.bench import Bench
from benchmarks.papers.experiments import EXPERIMENTS, Experiment
from testbed.data import datasets
from testbed.errors import TestbedError

PAGES = Path(__file__).parents[2] / "docs" / "papers"
RUNS = Path("runs") / "papers"
SETS = tuple(dict.fromkeys(experiment.paper for experiment in EXPERIMENTS))
WIDTH = 120
"""Maximum number of columns."""


def main() -> int:
    arguments = _arguments()
    console = Console(highlight=False, markup=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    chosen = [experiment for experiment in EXPERIMENTS if experiment.paper in arguments.sets]
    try:
        if not arguments.so_far:
            for name in {one.data for one in chosen if one.fits or arguments.full}:
                datasets.load(name, arguments.data)  # decoded once here, not in every process
    except TestbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return exit_code_of(partial(_run, arguments, chosen, console))


def _run(arguments: argparse.Namespace, chosen: Iterable[Experiment], console: Console) -> None:
    bench = Bench(arguments.runs, arguments.data, _say)
    if arguments.so_far:
        _write(bench, chosen, PAGES)
        return
    for experiment in chosen:
        if arguments.full:
            results.write(bench.run(experiment), PAGES / f"{experiment.name}.json")
            pages([experiment], PAGES)
        here = bench.run(experiment) if experiment.fits and not arguments.full else None
        _show(experiment, here, console)


def pages(experiments: Iterable[Experiment], folder: Path) -> None:
    """Write the tables of `experiments` into the pages of `folder`, from the results saved there.

    Raises TestbedError.
    """
    for experiment in experiments:
        page = folder / f"{experiment.paper}.md"
        text = report.markdown(experiment, results.read(folder / f"{experiment.name}.json"))
        page.write_text(
            report.filled(page.read_text(encoding="utf-8"), experiment.name, text), encoding="utf-8"
        )


def _write(bench: Bench, experiments: Iterable[Experiment], folder: Path) -> None:
    for experiment in experiments:
        if (done := bench.so_far(experiment)) is not None:
            results.write(done, folder / f"{experiment.name}.json")
        pages([experiment], folder)


def _show(experiment: Experiment, here: results.Result | None, console: Console) -> None:
    if here is not None:
        report.show(experiment, here, console, report.made(experiment, here))
        return
    kept = results.read(PAGES / f"{experiment.name}.json")
    told = f"Not run here. {report.made(experiment, kept)}" if kept else "Not run yet (--full)."
    report.show(experiment, kept, console, told)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers")
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"any of {', '.join(SETS)}; default: all")
    parser.add_argument("--data", type=Path, help="folder of the datasets (TESTBED_DATA)")
    parser.add_argument("--runs", type=Path, default=RUNS, help=f"folder of the runs (default: {RUNS})")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--full", action="store_true", help="run all experiments, write docs/papers")
    how.add_argument("--so-far", action="store_true", help="write the finished runs into docs/papers")
    arguments = parser.parse_args()
    for name in arguments.sets:
        if name not in SETS:
            parser.error(f"unknown set {name!r}, expected one of {', '.join(SETS)}")
    arguments.sets = arguments.sets or list(SETS)
    if arguments.data is None and "TESTBED_DATA" in os.environ:
        arguments.data = Path(os.environ["TESTBED_DATA"])
    return arguments


if __name__ == "__main__":
    sys.exit(main())

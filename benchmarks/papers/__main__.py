"""The papers' experiments in virtual time: our figures, and each published claim beside them.

    python -m benchmarks.papers [area] [fedfix] [defedavg] [fedfa] [--data FOLDER] [--runs FOLDER]
                                [--quick]

Four sets, of the papers on AREA (Iakovidou & Kim), FedFix (Fraboni et al.), DeFedAvg (Wang et al.) and
FedFa (Xu et al.). The fifth that our rules are from, Toghani & Uribe 2022 on FedBuff, is theory and
has no experiments; FedBuff runs in the sets of AREA, DeFedAvg and FedFa.

Without names, all of them: half an hour or so on two cores. Their runs are those of sweeps
(`testbed.sweeps`), and are kept where --runs says: what is done there already is not run again. They
need MNIST, CIFAR-10 and Shakespeare, as parquet files under FOLDER (or TESTBED_DATA) in the layout of
the Hugging Face hub, else from there.
Exits with 0 whether or not the claims hold, and with 2 where the data is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.papers import area, defedavg, fedfa, fedfix
from benchmarks.papers.bench import Bench
from benchmarks.papers.report import Report, show
from testbed.errors import TestbedError
from testbed.host.signals import interrupting
from testbed.plan import datasets

MNIST, CIFAR10, SHAKESPEARE = "ylecun/mnist", "uoft-cs/cifar10", "flwrlabs/shakespeare"
SETS: dict[str, tuple[Callable[..., Report], tuple[str, ...]]] = {
    "area": (area.report, (MNIST,)),
    "fedfix": (fedfix.report, (MNIST, CIFAR10, SHAKESPEARE)),
    "defedavg": (defedavg.report, (CIFAR10,)),
    "fedfa": (fedfa.report, (CIFAR10,)),
}
"""Sets of experiments, with the datasets that they need."""
WITHOUT = "Toghani & Uribe 2022 (FedBuff, arXiv 2210.01161), the fifth paper, has no experiments."
WIDTH = 100
"""Columns, at most."""


def main() -> int:
    arguments = _arguments()
    console = Console(highlight=False, markup=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    root = arguments.data
    try:
        for dataset in {name for chosen in arguments.sets for name in SETS[chosen][1]}:
            datasets.load(dataset, root)  # decoded once, not by every process
    except TestbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        with interrupting(), tempfile.TemporaryDirectory(prefix="papers-") as scratch:
            bench = Bench(arguments.runs or Path(scratch), root, _say)
            for chosen in arguments.sets:
                show(SETS[chosen][0](bench, quick=arguments.quick), console)
            console.print(f"\n{bench.runs} runs, {bench.elapsed}")
            if arguments.sets == list(SETS):
                console.print(f"Four papers: {', '.join(SETS)}. {WITHOUT}")
    except KeyboardInterrupt:
        return 130
    except TestbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.quick:
        console.print("Quick: too few runs, and too short, for the verdicts to be trusted.")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers")
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(SETS)}; default: all")
    parser.add_argument("--data", type=Path, help="folder with datasets (TESTBED_DATA)")
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder, and carry on there")
    parser.add_argument("--quick", action="store_true", help="do the runs work? Mind no verdict")
    arguments = parser.parse_args()
    for name in arguments.sets:
        if name not in SETS:
            parser.error(f"no set is called {name!r}, expected one of {', '.join(SETS)}")
    arguments.sets = arguments.sets or list(SETS)
    if arguments.data is None and "TESTBED_DATA" in os.environ:
        arguments.data = Path(os.environ["TESTBED_DATA"])
    return arguments


if __name__ == "__main__":
    sys.exit(main())

"""Stretched time against unstretched: one fleet that fits this host, at dilation 1 and at dilation 4.

    python -m benchmarks.dilation [TOPOLOGY]

All that is printed is device time, so that the two should agree: medians of runs in turns, and by how
much runs of one dilation differ among themselves (greatest ÷ least). Ratios: dilation 4 ÷ dilation 1.
Let the machine be quiet, for ten minutes or so. Datasets other than the digits come from TESTBED_DATA.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import yaml

from analysis.load import Run
from benchmarks import prediction
from testbed import engine

_TOPOLOGY = Path(__file__).parent.parent / "topologies" / "dilation.yaml"
_DILATIONS = (1, 4)
_TURNS = 3


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else _TOPOLOGY
    runtime = "docker" if engine.available() else "process"
    wanted = yaml.safe_load(path.read_text(encoding="utf-8"))
    runs: dict[int, list[Run]] = {dilation: [] for dilation in _DILATIONS}
    with tempfile.TemporaryDirectory() as name:
        for turn in range(_TURNS):
            for dilation in _DILATIONS:
                folder = Path(name) / f"{turn}-{dilation}"
                folder.mkdir()
                copy = folder / path.name
                copy.write_text(yaml.safe_dump({**wanted, "dilation": dilation}), encoding="utf-8")
                runs[dilation].append(prediction.run(copy, runtime, folder / "runs"))
        print(f"{path.name} in {runtime}, {_TURNS} runs each")
        for line in comparison(*runs.values()):
            print(line)


def comparison(plain: list[Run], stretched: list[Run]) -> Iterator[str]:
    """The table: devices, then the model's progress."""
    yield f"{'':<24}{'dilation 1':>12}{'differ':>8}{'dilation 4':>12}{'differ':>8}{'ratio':>7}"
    tables = [[prediction.table(run) for run in runs] for runs in (plain, stretched)]
    for quantity, title in {"updates": "updates", "staleness": "mean staleness"}.items():
        yield title
        for device in tables[0][0].index:
            yield _line(device, *([table.loc[device, quantity] for table in of] for of in tables))
    yield "seconds to an accuracy"
    for accuracy in (0.5, 0.6, 0.7, 0.8, 0.85):
        times = ([prediction.time_to(accuracy, run) for run in runs] for runs in (plain, stretched))
        yield _line(f"{accuracy:.0%}", *times)


def _line(name: str, plain: list[float], stretched: list[float]) -> str:
    cells = (f"{median(of):>12.4g}{max(of) / min(of):>8.2f}" for of in (plain, stretched))
    return f"  {name:<22}{''.join(cells)}{median(stretched) / median(plain):>7.2f}"


if __name__ == "__main__":
    main()

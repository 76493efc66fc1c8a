"""Stretched time against unstretched: one fleet that fits this host, at dilation 1 and at dilation 4.

    python -m benchmarks.dilation [TOPOLOGY]

All that is printed is device time, so that the two should agree. Ratios are dilation 4 ÷ dilation 1.
Takes the run's length five times; let the machine be quiet. Datasets other than the digits come from
TESTBED_DATA.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from analysis.load import Run
from benchmarks import prediction
from testbed import engine

_TOPOLOGY = Path(__file__).parent.parent / "topologies" / "prediction.yaml"
_LENGTH = "20s"
_DILATIONS = (1, 4)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else _TOPOLOGY
    runtime = "docker" if engine.available() else "process"
    wanted = yaml.safe_load(path.read_text(encoding="utf-8"))
    runs = []
    with tempfile.TemporaryDirectory() as name:
        for dilation in _DILATIONS:
            folder = Path(name) / str(dilation)
            folder.mkdir()
            copy = folder / path.name
            stretched = {**wanted, "dilation": dilation, "stop": {"after": _LENGTH}}
            copy.write_text(yaml.safe_dump(stretched), encoding="utf-8")
            runs.append(prediction.run(copy, runtime, folder / "runs"))
        print(f"{path.name} in {runtime}, {_LENGTH} of device time")
        for line in comparison(*runs):
            print(line)


def comparison(plain: Run, stretched: Run) -> Iterator[str]:
    """The table: devices, then the model's progress."""
    yield f"{'':<24}{'dilation 1':>12}{'dilation 4':>12}{'ratio':>7}"
    left, right = prediction.table(plain), prediction.table(stretched)
    for quantity, title in {"updates": "updates", "staleness": "mean staleness"}.items():
        yield title
        for device in left.index:
            yield _line(device, left.loc[device, quantity], right.loc[device, quantity])
    yield "seconds to an accuracy"
    for accuracy in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9):
        yield _line(f"{accuracy:.0%}", *(prediction.time_to(accuracy, of) for of in (plain, stretched)))


def _line(name: str, plain: float, stretched: float) -> str:
    ratio = stretched / plain if plain else float("nan")
    return f"  {name:<22}{plain:>12.4g}{stretched:>12.4g}{ratio:>7.2f}"


if __name__ == "__main__":
    main()

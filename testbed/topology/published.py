"""Published traces of throughput, as rows of a link trace's CSV (`testbed.topology.link_traces`).

- `riiser`: Riiser et al., Commute Path Bandwidth Traces from 3G Networks, MMSys 2013, and, in the same
  columns, van der Hooft et al., HTTP/2-based Adaptive Streaming of HEVC Video over 4G/LTE Networks,
  IEEE Communications Letters 2016: two times, latitude, longitude, bytes received since the line
  before, and the milliseconds that these took.
- `ucc`: Raca et al., Beyond Throughput: a 4G LTE Dataset, MMSys 2018, and Beyond Throughput, the Next
  Generation: a 5G Dataset, MMSys 2020: CSV by G-NetTrack Pro, with Timestamp as in 2019.12.16_13.40.04
  and DL_bitrate in kbit/s. Lines of State I are left out: nothing was downloaded then. Its UL_bitrate
  is of acknowledgements.
- `pensieve`: lines of a time in seconds and Mbit/s, as Pensieve (Mao et al., SIGCOMM 2017) reads them,
  and in which traces of the FCC, of Riiser et al., Oboe and Puffer are handed on.

All are of downloads, and tell what these got: of the link, what it had to give at the least.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from testbed.topology import link_traces


@dataclass(frozen=True, slots=True)
class RateSample:
    """From `begin` on."""

    begin: float
    """Seconds, from any moment."""
    rate: float
    """bit/s."""


def riiser(lines: Iterable[str]) -> Iterator[RateSample]:
    """A line is about the time before it. Raises ValueError."""
    end = 0.0
    for number, line in _significant(lines):
        cells = line.split()
        if len(cells) != 6:
            raise _error(number, f"found {len(cells)} columns, expected 6: two times, place, bytes, ms")
        size, took = _number(number, "bytes", cells[4]), _number(number, "milliseconds", cells[5])
        if took:  # the first line of some files has none
            yield RateSample(end, 8000 * size / took)
        end += took / 1000


def ucc(lines: Iterable[str]) -> Iterator[RateSample]:
    """Raises ValueError."""
    rows = csv.DictReader(lines)
    missing = {"Timestamp", "DL_bitrate"} - set(rows.fieldnames or ())
    if missing:
        raise _error(
            1, f"found no column {', '.join(sorted(missing))}, expected a file of G-NetTrack Pro"
        )
    for row in rows:
        text = row["Timestamp"] or ""
        try:
            at = datetime.datetime.strptime(f"{text} +0000", "%Y.%m.%d_%H.%M.%S %z")
        except ValueError:
            message = f"found {text!r:.40}, expected a time as 2019.12.16_13.40.04"
            raise _error(rows.line_num, message) from None
        if row.get("State") != "I" and row["DL_bitrate"] not in ("-", "", None):
            yield RateSample(
                at.timestamp(), 1000 * _number(rows.line_num, "DL_bitrate", row["DL_bitrate"])
            )


def pensieve(lines: Iterable[str]) -> Iterator[RateSample]:
    """Raises ValueError."""
    for number, line in _significant(lines):
        cells = line.split()
        if len(cells) != 2:
            raise _error(number, f"found {len(cells)} columns, expected 2: seconds and Mbit/s")
        at, rate = _number(number, "time", cells[0]), _number(number, "Mbit/s", cells[1])
        yield RateSample(at, 1e6 * rate)


FORMATS: Mapping[str, Callable[[Iterable[str]], Iterator[RateSample]]] = {
    "riiser": riiser,
    "ucc": ucc,
    "pensieve": pensieve,
}
"""By name: what reads its lines."""


def as_csv(
    samples: Iterable[RateSample], direction: str = "down", *, scale: float = 1.0, source: str = ""
) -> str:
    """A link trace of that `direction`, for `link: {trace: {csv: ...}}`, with rates times `scale`.

    It begins at 0. Samples of one time, as a clock with whole seconds has them, become their mean.
    Raises ValueError where there are none, or times do not rise.
    """
    rows: list[tuple[float, float]] = []
    for begin, group in itertools.groupby(samples, lambda sample: sample.begin):
        if rows and begin < rows[-1][0]:
            raise ValueError(f"a time of {begin:g} s follows {rows[-1][0]:g} s, expected rising times")
        rates = [sample.rate for sample in group]
        rows.append((begin, scale * math.fsum(rates) / len(rates)))
    if not rows:
        raise ValueError("has no measured throughput")
    lines = [*(f"# {line}" for line in source.splitlines()), f"time,{direction}"]
    lines += [f"{begin - rows[0][0]:.10g},{rate:.10g}" for begin, rate in rows]
    link_traces.read_csv(lines)  # what is written can be read
    return "\n".join(lines) + "\n"


def _significant(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _number(number: int, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise _error(number, f"{name} is {text!r:.40}, expected a number from 0 on")
    return value


def _error(number: int, message: str) -> ValueError:
    return ValueError(f"line {number}: {message}")

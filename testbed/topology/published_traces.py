"""Published throughput traces, converted to the CSV of link traces (`testbed.topology.link_traces`).

- `riiser`: Riiser et al., Commute Path Bandwidth Traces from 3G Networks, MMSys 2013; and, with the same
  columns, van der Hooft et al., HTTP/2-based Adaptive Streaming of HEVC Video over 4G/LTE Networks,
  IEEE Communications Letters 2016. Columns: two times, latitude, longitude, bytes received since the
  previous line, and the milliseconds that this took.
- `ucc`: Raca et al., Beyond Throughput: a 4G LTE Dataset, MMSys 2018; and Beyond Throughput, the Next
  Generation: a 5G Dataset, MMSys 2020. CSV of G-NetTrack Pro, with Timestamp such as 2019.12.16_13.40.04
  and DL_bitrate in kbit/s. Lines with State I (idle) are skipped, because nothing was downloaded then.
  UL_bitrate is ignored: it counts acknowledgements only.
- `pensieve`: each line has a time in seconds and a rate in Mbit/s, as Pensieve (Mao et al., SIGCOMM
  2017) reads them. Traces of the FCC, of Riiser et al., Oboe and Puffer are distributed in this format.

All traces were measured with downloads. Each rate is that of the download: a lower bound of the link's
rate.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from testbed.topology import link_traces
from testbed.topology.numbers import read_number


@dataclass(frozen=True, slots=True)
class RateSample:
    """Valid from `begin` to the begin of the next sample."""

    begin: float
    """Seconds from an arbitrary origin."""
    rate: float
    """bit/s."""


def riiser(lines: Iterable[str]) -> Iterator[RateSample]:
    """The rate in a line was measured before the time of the line. Raises ValueError if a line does not
    have this format."""
    end = 0.0
    for number, line in _significant(lines):
        cells = line.split()
        if len(cells) != 6:
            raise _error(
                number,
                f"found {len(cells)} columns, expected 6: two times, latitude, longitude, bytes, ms",
            )
        size, took = _number(number, "bytes", cells[4]), _number(number, "milliseconds", cells[5])
        if took:  # 0 in the first line of some files
            yield RateSample(end, 8000 * size / took)
        end += took / 1000


def ucc(lines: Iterable[str]) -> Iterator[RateSample]:
    """Raises ValueError if the lines do not have this format."""
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
            message = f"found {text!r:.40}, expected a time such as 2019.12.16_13.40.04"
            raise _error(rows.line_num, message) from None
        if row.get("State") != "I" and row["DL_bitrate"] not in ("-", "", None):
            kbit = _number(rows.line_num, "DL_bitrate", row["DL_bitrate"])
            yield RateSample(at.timestamp(), 1000 * kbit)


def pensieve(lines: Iterable[str]) -> Iterator[RateSample]:
    """Raises ValueError if the lines do not have this format."""
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


def as_csv(
    samples: Iterable[RateSample], direction: str = "down", *, scale: float = 1.0, source: str = ""
) -> str:
    """Write for `link: {trace: {csv: ...}}`. `direction`: `up` or `down`.

    Rates are multiplied by `scale`. Times are shifted, so that they begin at 0. `source` becomes comment
    lines. If several samples have the same time, as from a clock with whole seconds, they are replaced
    by their mean. Raises ValueError if there are no samples, or if the times decrease.
    """
    rows: list[tuple[float, float]] = []
    for begin, group in itertools.groupby(samples, lambda sample: sample.begin):
        if rows and begin < rows[-1][0]:
            raise ValueError(
                f"a time of {begin:g} s follows {rows[-1][0]:g} s, expected increasing times"
            )
        rates = [sample.rate for sample in group]
        rows.append((begin, scale * math.fsum(rates) / len(rates)))
    if not rows:
        raise ValueError("has no measured throughput")
    lines = [*(f"# {line}" for line in source.splitlines()), f"time,{direction}"]
    lines += [f"{begin - rows[0][0]:.10g},{rate:.10g}" for begin, rate in rows]
    link_traces.read_csv(lines)  # checks that the result can be read
    return "\n".join(lines) + "\n"


def _significant(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _number(line: int, name: str, text: str) -> float:
    try:
        return read_number(text, name)
    except ValueError as error:
        raise _error(line, str(error)) from None


def _error(number: int, message: str) -> ValueError:
    return ValueError(f"line {number}: {message}")

"""Link traces: how an access link changes over time, read from files, also from published ones, as steps
of a run."""

from __future__ import annotations

import csv
import datetime
import heapq
import io
import itertools
import math
from array import array
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agents import config
from agents.device_actions import SetLink
from agents.disk import files
from agents.timing.nanoseconds import from_seconds
from testbed.topology import units
from testbed.topology.links import LinkTrace
from testbed.topology.scenario import Step
from testbed.topology.units import read_number

# Link traces: how an access link changes over time, read from files, as steps of a run.
#
# There are two formats.
#
# - mahimahi: each line has a time in whole milliseconds at which 1500 bytes can pass in one direction.
# The
#   last line is also the duration of the trace. After this time, the trace repeats without end.
# - CSV: a header line with `time` (seconds) and any of `up`, `down` (bit/s), `rtt` (seconds) and `loss`
#   (fraction of the packets). Then a row of numbers follows for each change of the link. A row holds
#   until the next row. The first row is at time 0. Empty lines and lines that begin with # are skipped.

PACKET_BYTES = 1500
"""Bytes that one line of a mahimahi trace lets through."""
STEP_S = 0.5
"""Seconds over which the rate of a mahimahi trace is averaged. Shorter steps would cost more CPU time,
because each change of a link takes some milliseconds. Most transfers take longer than one step."""
_OUTAGE = 1_000
"""bit/s in place of 0, which the kernel's shapers do not accept. At this rate one packet takes 12 s."""

_LIMITS = {
    "time": (1e9, "seconds"),
    "up": (1e12, "bit/s"),
    "down": (1e12, "bit/s"),
    "rtt": (7200, "seconds"),
    "loss": (1, "a fraction"),
}
"""Maximum value and unit of each column."""
_EXPECTED = "expected time and any of up, down, rtt and loss"
_MAX_DIGITS = 12  # of a time in milliseconds
_MAX_BYTES = 64 * 2**20
"""This is enough for hours at hundreds of Mbit/s in mahimahi's format."""


@dataclass(frozen=True, slots=True)
class LinkSeries:
    """Each value holds from its time to the next time."""

    times: array[float]
    """Seconds, in increasing order; the first is 0."""
    columns: Mapping[str, array[float]]
    """Values at each of `times`, by name in `_LIMITS`. A rate of 0 is an outage, during which nothing
    passes."""
    period: float | None
    """Seconds after which the trace repeats. Without repetition, the last values hold for ever."""

    def changes(self) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield the time in seconds and all values from that time on. The first time is 0.

        The iterator is endless if the trace repeats.
        """
        rows = range(len(self.times))
        last: dict[str, float] = {}
        for number in itertools.count():
            for index in rows:
                values = {name: column[index] for name, column in self.columns.items()}
                if values != last:
                    yield number * (self.period or 0.0) + self.times[index], values
                last = values
            if self.period is None:
                return


def read(trace: LinkTrace, folder: Path) -> list[LinkSeries]:
    """Paths are relative to `folder`. Raises OSError, and ValueError that names the file."""
    found = []
    for key in ("up", "down", "csv"):
        if (name := getattr(trace, key)) is None:
            continue
        path = folder / name
        data = files.read(path, _MAX_BYTES)
        try:
            lines = io.StringIO(data.decode("utf-8-sig"), newline=None)
            if key == "csv":
                found.append(read_csv(lines, loop=trace.loop))
            else:
                found.append(read_mahimahi(lines, key))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return found


def read_mahimahi(lines: Iterable[str], direction: str, step_s: float = STEP_S) -> LinkSeries:
    """`direction`: `up` or `down`. The trace is divided into a whole number of equal steps of about
    `step_s` seconds. The rate of a step is the number of lines with a time in the step, times 1500
    bytes, divided by the length of a step. Raises ValueError with the line number."""
    times_ms = array("q", _milliseconds(lines))
    if not times_ms or times_ms[-1] == 0:
        raise ValueError(
            f"line {max(1, len(times_ms))}: the trace ends at 0 ms, expected its last time to be above 0"
        )
    period_ms = times_ms[-1]
    steps = max(1, round(period_ms / (1000 * step_s)))
    length = period_ms / steps / 1000

    def step_of(time_ms: int) -> int:
        """A time at the end of a step belongs to that step, because the last line of the trace is at the
        end of the last step."""
        return max(0, -(-time_ms * steps // period_ms) - 1)

    times, rates = array("d"), array("d")
    next_step = 0
    for number, group in itertools.groupby(times_ms, step_of):
        if number > next_step:
            times.append(next_step * length)
            rates.append(0)
        times.append(number * length)
        rates.append(_whole_rate(8 * PACKET_BYTES * sum(1 for _ in group) / length))
        next_step = number + 1
    return _trace(times, {direction: rates}, period_ms / 1000)


def read_csv(lines: Iterable[str], *, loop: bool = False) -> LinkSeries:
    """If `loop` is true, the trace repeats, and its last row holds as long as the row before it. Raises
    ValueError with the line number."""
    table = units.read_timed_csv(lines, _LIMITS, _checked_header)
    columns = dict(table.columns)
    for name in columns.keys() & {"up", "down"}:
        columns[name] = array("d", map(_whole_rate, columns[name]))
    return _trace(table.times, columns, table.period(loop=loop))


def merge(traces: Sequence[LinkSeries]) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield the merged `changes`, such as of both directions. If several traces have the same column,
    the first of these traces counts."""
    changes = [zip(itertools.repeat(number), trace.changes()) for number, trace in enumerate(traces)]
    current: list[dict[str, float]] = [{} for _ in traces]
    for time, group in itertools.groupby(heapq.merge(*changes, key=_time), _time):
        for number, (_, values) in group:
            current[number] = values
        now = ChainMap(*current)
        yield time, {name: now[name] for name in _LIMITS if name in now}


def _time(numbered_change: tuple[int, tuple[float, dict[str, float]]]) -> float:
    return numbered_change[1][0]


def link_at_start(link: config.AccessLink, traces: Sequence[LinkSeries]) -> config.AccessLink:
    """Take the traces' values at time 0. An outage at time 0 is ignored."""
    if not traces:
        return link
    _, values = next(merge(traces))
    # With an outage from the start, the client could not become ready.
    return link.with_changes(
        {name: value for name, value in _link_changes(values).items() if value != _OUTAGE}
    )


def has_loss(traces: Iterable[LinkSeries]) -> bool:
    return any(any(one.columns.get("loss", ())) for one in traces)


def steps(device: str, traces: Sequence[LinkSeries]) -> Iterator[Step]:
    """In the order of time; endless if a trace repeats."""
    for at, values in merge(traces):
        yield Step(from_seconds(at), device, SetLink(_link_changes(values)))


def _link_changes(values: Mapping[str, float]) -> dict[str, float | None]:
    return {
        name: max(int(value), _OUTAGE) if name in ("up", "down") else value
        for name, value in values.items()
    }


def _milliseconds(lines: Iterable[str]) -> Iterator[int]:
    last = 0
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
            raise ValueError(
                f"line {number}: found {text!r:.40}, expected a whole number of milliseconds"
            )
        time_ms = int(text)
        if time_ms < last:
            raise ValueError(
                f"line {number}: found {time_ms} ms, expected at least {last} ms, the time before it"
            )
        last = time_ms
        yield time_ms


def _checked_header(header: list[str]) -> list[str]:
    for name in header:
        if name not in _LIMITS:
            raise ValueError(f"found the column {name!r:.40}, {_EXPECTED}")
        if header.count(name) > 1:
            raise ValueError(f"found the column {name} twice, {_EXPECTED}")
    if "time" not in header or len(header) < 2:
        raise ValueError(f"found only the column {', '.join(header)}, {_EXPECTED}")
    return header


def _whole_rate(rate: float) -> int:
    """A rate above 0 stays above 0, because 0 is an outage."""
    return max(1, round(rate)) if rate else 0


def _trace(times: array[float], columns: Mapping[str, array[float]], period: float | None) -> LinkSeries:
    """`period`: seconds; None for no repetition. A trace whose values never change does not repeat."""
    changes = any(len(set(column)) > 1 for column in columns.values())
    return LinkSeries(times, columns, period if changes else None)


# Published throughput traces, converted to the CSV of link traces (`testbed.topology.link_traces`).
#
# - `riiser`: Riiser et al., Commute Path Bandwidth Traces from 3G Networks, MMSys 2013; and, with the
# same
#   columns, van der Hooft et al., HTTP/2-based Adaptive Streaming of HEVC Video over 4G/LTE Networks,
#   IEEE Communications Letters 2016. Columns: two times, latitude, longitude, bytes received since the
#   previous line, and the milliseconds that this took.
# - `ucc`: Raca et al., Beyond Throughput: a 4G LTE Dataset, MMSys 2018; and Beyond Throughput, the Next
#   Generation: a 5G Dataset, MMSys 2020. CSV of G-NetTrack Pro, with Timestamp such as
#   2019.12.16_13.40.04 and DL_bitrate in kbit/s. Lines with State I (idle) are skipped, because nothing
#   was downloaded then. UL_bitrate is ignored: it counts acknowledgements only.
# - `pensieve`: each line has a time in seconds and a rate in Mbit/s, as Pensieve (Mao et al., SIGCOMM
#   2017) reads them. Traces of the FCC, of Riiser et al., Oboe and Puffer are distributed in this
#   format.
#
# All traces were measured with downloads. Each rate is that of the download: a lower bound of the link's
# rate.


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


PUBLISHED_FORMATS: Mapping[str, Callable[[Iterable[str]], Iterator[RateSample]]] = {
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
    read_csv(lines)  # checks that the result can be read
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

"""Output of the command line: consoles, text, tables and JSON.

rich is imported only when something is printed, so that `testbed --help` and shell completion are fast.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from agents.texts import quantity as quantity

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod
    from rich.table import Table

_TEXTS = ("device", "profile", "state")
"""Columns of a `number_table` that hold words and are aligned left. All others hold numbers."""
_WORTH_SECONDS = 2.0
"""Remaining time is reported only if the work has taken at least this long, and will take at least this
long more."""
_RAREST_SECONDS = 30.0
"""Seconds between two progress lines."""
_ANY_WIDTH = 10_000
"""Characters: more than the widest line of any table has."""
Report = Callable[[str], object]


def silent(_: str) -> None: ...


verbosity = 0
"""-1 with `--quiet` (only results and errors), 1 with `--verbose`."""


@functools.cache
def out() -> Console:
    return _console(stderr=False)


@functools.cache
def err() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    """If the stream is not a terminal, tables are as wide as their contents."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.file = cast("IO[str]", _Unpadded("stderr" if stderr else "stdout"))
        if "COLUMNS" not in os.environ:
            console.width = 1000
    return console


class _Unpadded:
    """Removes the trailing blanks that rich writes in the lines of a table to a stream of `sys`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(sys, self._name), attribute)

    def write(self, text: str) -> int:
        return int(getattr(sys, self._name).write(re.sub(" +(?=\n)", "", text)))


def print_text(text: str) -> None:
    """Markup in the text has no effect, and lines are wrapped only on a terminal."""
    out().print(text, soft_wrap=True)


def remark(text: str) -> None:
    """Progress, or a hint on what to do next. With `--quiet`, print nothing."""
    if verbosity >= 0:
        print_text(text)


@contextmanager
def busy(text: str) -> Iterator[None]:
    """Show `text` and the elapsed time below other output, if standard output is a terminal. Use this
    for work whose duration cannot be predicted."""
    if verbosity < 0 or not out().is_terminal:
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=out(), transient=True) as shown:
        shown.add_task(text, total=None)
        yield


class ProgressReporter:
    """The first line comes after two seconds. Further lines come less and less often, but at least every
    30 s."""

    def __init__(self, report: Report, what: str, *, of_bytes: bool = False) -> None:
        """`what`: beginning of each line. `of_bytes`: whether lines give MB and MB/s, and not a
        percentage."""
        self._report, self._what, self._of_bytes = report, what, of_bytes
        self._begun = time.monotonic()
        self._due = 0.0

    def __call__(self, done: float, total: float, before: float = 0.0) -> None:
        """`before`: part of `done` that was already finished when this reporter was made."""
        taken = time.monotonic() - self._begun
        left = time_left(taken, done - before, total - before)
        if not left or taken < self._due:
            return
        self._due = taken + min(taken, _RAREST_SECONDS)
        told = f"{done / total:.0%}"
        if self._of_bytes:
            rate = (done - before) / taken
            told = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB at {rate / 1e6:.1f} MB/s"
        self._report(f"{self._what}: {told}, {left}")


def time_left(taken: float, done: float, total: float) -> str:
    """Extrapolate from `taken` seconds for `done` of `total` equal pieces. The text is empty if less
    than two seconds were taken or are left."""
    left = taken / done * (total - done) if done else math.inf
    return "" if taken < _WORTH_SECONDS else time_left_text(left)


def time_left_text(left: float) -> str:
    """`about 40 s left` for example; empty if `left` is below 2 s or infinite."""
    if not _WORTH_SECONDS <= left < math.inf:
        return ""
    if left < 90:
        return f"about {left:.0f} s left"
    return f"about {left / 60:.0f} min left" if left < 5400 else f"about {left / 3600:.1f} h left"


def print_json(value: Any) -> None:
    """`value` may have dataclasses. Numbers that are not finite become null, because JSON does not have
    such numbers."""
    from pydantic_core import to_jsonable_python

    sys.stdout.write(json.dumps(to_jsonable_python(value, inf_nan_mode="null"), indent=2) + "\n")


def print_last_line(result: str, following: str) -> None:
    """`following` says what the user can do next. With `--quiet`, print only `result`."""
    line = " · ".join(filter(None, (result, f"Next: {following}" if verbosity >= 0 else "")))
    if line:
        print_text(line)


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    files: Sequence[Path]
    """Files or folders."""


def print_files(files: Sequence[Path], *, as_json: bool) -> None:
    if as_json:
        print_json(WrittenFiles(files))
        return
    for file in files:
        print_text(str(file))


def show(rows: Sequence[Mapping[str, Any]], empty: str = "", *, spare: Sequence[str] = ()) -> None:
    """`empty`: text if there are no rows. If the terminal is too narrow, columns are left out in the
    order of `spare`, and a remark names the columns that were left out."""
    if not rows:
        print_text(empty)
    else:
        left_out: list[str] = []
        while not fits(shown := _fill_table(rows, left_out)) and len(left_out) < len(spare):
            left_out.append(spare[len(left_out)])
        out().print(shown)
        if left_out:
            remark(f"Not shown, as the terminal is too narrow: {', '.join(left_out)} (--json has all)")


def _fill_table(rows: Sequence[Mapping[str, Any]], left_out: Sequence[str]) -> Table:
    kept = [name for name in rows[0] if name not in left_out]
    made = table(kept)
    for row in rows:
        made.add_row(*(_cell(row[name]) for name in kept))
    return made


def _cell(value: object) -> str:
    if value is None or value != value:  # NaN
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def fits(shown: Table) -> bool:
    """Whether the longest line fits into a line of standard output."""
    wide = out().options.update(max_width=_ANY_WIDTH)  # else the result is capped at the console's width
    return out().measure(shown, options=wide).maximum <= out().width


def show_numbers(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column holds names. If the terminal is too narrow, print the table transposed, with a
    line per heading and a column per row, in as many parts as needed."""
    made = _numbers(headings, rows)
    if fits(made):
        out().print(made)
        return
    rest = list(rows)
    while rest:
        lines = [*zip(headings, *rest, strict=True)]
        count = len(rest)
        while (
            not fits(made := _numbers(lines[0][: count + 1], [line[: count + 1] for line in lines[1:]]))
            and count > 1
        ):
            count -= 1
        out().print(made)
        rest = rest[count:]


def _numbers(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    made = number_table(*headings)
    made.columns[0].justify = "left"
    for row in rows:
        made.add_row(*row)
    return made


def table(columns: list[str]) -> Table:
    """An empty table without ruling lines. Long cells are wrapped."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=number == 0)
    return made


def number_table(*columns: str) -> Table:
    """An empty table without ruling lines. Cells are never wrapped."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        justify: JustifyMethod = "left" if column in _TEXTS else "right"
        made.add_column(column, justify=justify, no_wrap=True)
    return made


def shorten(name: str, width: int = 16) -> str:
    """Cut out the middle, because names of devices differ by the number at the end."""
    return name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-width // 2 :]}"

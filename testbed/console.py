"""Output of the command line: its consoles, text, tables and JSON.

rich is imported when something is printed: `testbed --help` and a shell's completion do without.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from agents.texts import quantity as quantity

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod
    from rich.table import Table

_TEXTS = ("device", "profile", "state")
"""Columns of words in `plain` tables; all others are numbers."""
_WORTH_SECONDS = 2.0
"""What takes less is not told the time of."""
_RAREST_SECONDS = 30.0
"""At most, from one line on progress to the next."""
_ANY_WIDTH = 10_000
"""Characters, more than any table has in a line."""
Report = Callable[[str], object]
"""Is told lines on progress."""


def silent(_: str) -> None:
    """A `Report` that nobody reads."""


verbosity = 0
"""What the user wants to read: -1 with `--quiet`, results and errors alone; 1 with `--verbose`."""


@functools.cache
def out() -> Console:
    """Standard output."""
    return _console(stderr=False)


@functools.cache
def err() -> Console:
    """Standard error."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    """A console whose tables are as wide as their contents where no screen sets a limit."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.file = cast("IO[str]", _Unpadded("stderr" if stderr else "stdout"))
        if "COLUMNS" not in os.environ:
            console.width = 1000
    return console


class _Unpadded:
    """A stream of `sys`, without the blanks that rich fills the lines of a table with."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(sys, self._name), attribute)

    def write(self, text: str) -> int:
        return int(getattr(sys, self._name).write(re.sub(" +(?=\n)", "", text)))


def print_text(text: str) -> None:
    """Print text as it is: never read as markup, and lines broken by a terminal alone."""
    out().print(text, soft_wrap=True)


def remark(text: str) -> None:
    """Print what is no result: progress, and what to do next. With `--quiet` nothing."""
    if verbosity >= 0:
        print_text(text)


@contextmanager
def busy(text: str) -> Iterator[None]:
    """Inside, a terminal shows `text` and how long it has taken so far, below what else is printed. For
    what has no end that could be foretold."""
    if verbosity < 0 or not out().is_terminal:
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=out(), transient=True) as shown:
        shown.add_task(text, total=None)
        yield


class Progress:
    """Tells from time to time how much is done of something that takes long, and the time that is left:
    first after two seconds, and then ever more rarely."""

    def __init__(self, report: Report, what: str, *, of_bytes: bool = False) -> None:
        """`of_bytes`: what is done is bytes, and told as such; else its share is."""
        self._report, self._what, self._of_bytes = report, what, of_bytes
        self._begun = time.monotonic()
        self._due = 0.0

    def __call__(self, done: float, total: float, before: float = 0.0) -> None:
        """`done` of `total` is; `before` of it was when this began."""
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
    """`about 40 s left`, where `done` of `total` equal pieces took `taken` seconds; empty where that is
    too early to say, or hardly worth it."""
    left = taken / done * (total - done) if done else math.inf
    return "" if taken < _WORTH_SECONDS else about(left)


def about(left: float) -> str:
    """`about 40 s left`; empty where that is hardly worth it, or never."""
    if not _WORTH_SECONDS <= left < math.inf:
        return ""
    if left < 90:
        return f"about {left:.0f} s left"
    return f"about {left / 60:.0f} min left" if left < 5400 else f"about {left / 3600:.1f} h left"


def print_json(value: Any) -> None:
    """Print `value` for programs; null stands for what is not finite, which JSON does not have."""
    sys.stdout.write(json.dumps(_finite(value), indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def closing(result: str, following: str) -> None:
    """Print the last line: what came of it, if anything, and unless `--quiet` what to do next."""
    line = " · ".join(filter(None, (result, f"Next: {following}" if verbosity >= 0 else "")))
    if line:
        print_text(line)


def written(files: Sequence[Path], *, as_json: bool) -> None:
    """Print what has been written."""
    if as_json:
        print_json({"files": [str(file) for file in files]})
        return
    for file in files:
        print_text(str(file))


def show(rows: list[dict[str, Any]], empty: str, *, as_json: bool, spare: Sequence[str] = ()) -> None:
    """Rows as an aligned table for people, or as JSON for programs. Where a terminal is too narrow, the
    columns of `spare` are left out, one after the other, and a remark says so."""
    if as_json:
        print_json(rows)
    elif not rows:
        print_text(empty)
    else:
        left_out: list[str] = []
        while not fits(shown := _filled(rows, left_out)) and len(left_out) < len(spare):
            left_out.append(spare[len(left_out)])
        out().print(shown)
        if left_out:
            remark(f"Not shown, as the terminal is too narrow: {', '.join(left_out)} (--json has all)")


def _filled(rows: Sequence[dict[str, Any]], left_out: Sequence[str]) -> Table:
    kept = [name for name in rows[0] if name not in left_out]
    made = table(kept)
    for row in rows:
        made.add_row(*(_cell(row[name]) for name in kept))
    return made


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def fits(shown: Table) -> bool:
    """Whether standard output has room for its lines."""
    wide = out().options.update(max_width=_ANY_WIDTH)  # else the answer is at most what there is
    return out().measure(shown, options=wide).maximum <= out().width


def show_numbers(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table, the first column of which has names. Where a terminal is too narrow, with a line for each
    heading and a column for each row, as many beside each other as there is room for."""
    made = _numbers(headings, rows)
    if fits(made):
        out().print(made)
        return
    rest = list(rows)
    while rest:
        count = len(rest)
        while not fits(made := _numbers(*_turned(headings, rest[:count]))) and count > 1:
            count -= 1
        out().print(made)
        rest = rest[count:]


def _turned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    lines = [list(line) for line in zip(headings, *rows, strict=True)]
    return lines[0], lines[1:]


def _numbers(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    made = plain(*headings)
    made.columns[0].justify = "left"
    for row in rows:
        made.add_row(*row)
    return made


def table(columns: list[str]) -> Table:
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=number == 0)
    return made


def plain(*columns: str) -> Table:
    """An empty table of numbers, without lines."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        justify: JustifyMethod = "left" if column in _TEXTS else "right"
        made.add_column(column, justify=justify, no_wrap=True)
    return made


def short(name: str, width: int = 16) -> str:
    """`name` with its middle left out where it is long: the number at its end tells devices apart."""
    return name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-width // 2 :]}"

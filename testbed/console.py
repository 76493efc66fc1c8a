"""Output of the command line: its consoles, text, tables and JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table

_TEXTS = ("device", "profile", "state")
"""Columns of words in `plain` tables; all others are numbers."""


def _console(*, stderr: bool = False) -> Console:
    """A console whose tables are as wide as their contents where no screen sets a limit."""
    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 1000
    return console


out = _console()
err = _console(stderr=True)


def print_text(text: str) -> None:
    """Print text as it is: never read as markup, and lines broken by a terminal alone."""
    out.print(text, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print `value` for programs."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def show(rows: list[dict[str, Any]], empty: str, *, as_json: bool) -> None:
    """Rows as an aligned table for people, or as JSON for programs."""
    if as_json:
        print_json(rows)
    elif not rows:
        print_text(empty)
    else:
        shown = table(list(rows[0]))
        for row in rows:
            shown.add_row(*("–" if value is None else str(value) for value in row.values()))
        out.print(shown)


def table(columns: list[str]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=number == 0)
    return made


def plain(*columns: str) -> Table:
    """An empty table of numbers, without lines."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        justify: JustifyMethod = "left" if column in _TEXTS else "right"
        made.add_column(column, justify=justify, no_wrap=True)
    return made


def short(name: str, width: int = 16) -> str:
    """`name` with its middle left out where it is long: the number at its end tells devices apart."""
    return name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-width // 2 :]}"

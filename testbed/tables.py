"""How tables look on the terminal."""

from __future__ import annotations

from rich.console import JustifyMethod
from rich.table import Table

_TEXTS = ("device", "profile", "state")
"""Columns of words; all others are numbers."""


def plain(*columns: str) -> Table:
    """An empty one, without lines."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        justify: JustifyMethod = "left" if column in _TEXTS else "right"
        made.add_column(column, justify=justify, no_wrap=True)
    return made


def short(name: str, width: int = 16) -> str:
    """`name` with its middle left out where it is long: the number at its end tells devices apart."""
    return name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-width // 2 :]}"

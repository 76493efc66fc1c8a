"""What a set of experiments came to, and how that is printed: our figures, then claim by claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Claim:
    """What a paper says, held against what we find."""

    published: str
    ours: str
    holds: bool
    reason: str = ""
    """Why it does not hold, where that is known."""

    @property
    def verdict(self) -> str:
        if self.holds:
            return "holds"
        return f"does not hold: {self.reason}" if self.reason else "does not hold"


@dataclass(frozen=True, slots=True)
class Report:
    title: str
    notes: str
    """How the runs differ from the paper's."""
    header: Sequence[str]
    figures: Sequence[Sequence[str]]
    """One row per line of the table."""
    claims: Sequence[Claim]
    texts: int = 1
    """How many columns of `figures` are texts, the first ones; the others are numbers."""


def show(report: Report, console: Console) -> None:
    """Print `report`, its claims below its figures."""
    console.print()
    console.print(Text(report.title, "bold"))
    console.print(Text(report.notes))
    console.print()
    figures = _table()
    for number, name in enumerate(report.header):
        figures.add_column(name, justify="left" if number < report.texts else "right")
    for row in report.figures:
        figures.add_row(*row)
    console.print(figures)
    console.print()
    claims = _table()
    for name, share in (("published", 5), ("here", 4), ("", 3)):
        claims.add_column(name, ratio=share, overflow="fold")
    for claim in report.claims:
        verdict = Text(claim.verdict, "" if claim.holds else "bold")
        claims.add_row(claim.published, claim.ours, verdict)
    claims.expand = True
    console.print(claims)


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")

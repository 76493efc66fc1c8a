"""Rows of claims and figures, printed for people, or written into the pages of docs/papers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.papers import judging
from benchmarks.papers.experiments import MEASURES, Experiment
from benchmarks.papers.honest import Verdict
from benchmarks.papers.results import Result
from testbed.errors import BadInputError

_CLAIMS = ("claim", "published", "here", "difference", "seeds", "verdict")
LINE = 120
"""Maximum number of characters in a line of a page."""
_DECIDED = (Verdict.HOLDS, Verdict.FAILS)


def show(experiment: Experiment, result: Result | None, console: Console, told: str = "") -> None:
    """Print the claims of `experiment` and their verdicts; `told`: a sentence on these runs."""
    console.print()
    console.print(Text(experiment.title, "bold"))
    for line in filter(None, (told, experiment.differs)):
        console.print(Text(line))
    if result is None:
        for claim in experiment.claims:
            published = f" (published: {claim.published})" if claim.published else ""
            console.print(Text(f"  {claim.text}{published}"))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim", expand=True)
    for name, share in zip(_CLAIMS, (5, 2, 4, 4, 0, 4), strict=True):
        table.add_column(name, ratio=share or None, overflow="fold")
    for row in judging.rows(experiment, result):
        verdict = Text(_verdict(row), "" if row.verdict is Verdict.HOLDS else "bold")
        table.add_row(row.claim, row.published, row.ours, row.difference, str(row.seeds or ""), verdict)
    console.print(table)


def markdown(experiment: Experiment, result: Result | None) -> str:
    """Format the claims and figures of `experiment` as tables of a page."""
    claims = [
        (row.claim, row.published, row.ours, row.difference, str(row.seeds or ""), _strong(row))
        for row in judging.rows(experiment, result)
    ]
    parts = [f"### {experiment.title}", textwrap.fill(experiment.differs, LINE)]
    if claims:
        parts.append(_table(_CLAIMS, claims))
    elif result is None:
        parts.append("Not run.")
    if result is not None:
        header = ("", MEASURES[experiment.figure].name, "step size", "seeds compared")
        figures = [
            (
                line.variant,
                line.shown,
                f"{line.lr:g}{', the edge' * line.at_edge}{', nearly as good' * (not line.chosen)}",
                str(line.seeds) if line.seeds else "none, the one that chose",
            )
            for line in judging.lines(experiment, result)
        ]
        parts += [_table(header, figures), textwrap.fill(made(experiment, result), LINE)]
    runtime = " --runtime virtual" if experiment.sweep else ""
    sweep = f"`testbed sweep topologies/papers/sweeps/{experiment.file}{runtime}`"
    return "\n\n".join(filter(None, [*parts, sweep])) + "\n"


def made(experiment: Experiment, result: Result) -> str:
    """Describe when and where the runs were made."""
    return (
        f"{len(result.cells)} runs of {sum(cell.updates for cell in result.cells):,} updates, "
        f"{result.date}, {result.cores} cores; wall time {result.hours:.1f} h, one run after the other. "
        f"Hashes of their manifests: `{experiment.name}.json`."
    )


def filled(page: str, name: str, text: str) -> str:
    """Return `page` with `text` between its marks `name`. Raises BadInputError if it lacks them."""
    begin, end = (f"<!-- {what} {name} -->" for what in ("begin", "end"))
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise BadInputError(f"the page has no place for {name}: write the lines {begin} and {end}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def _verdict(row: judging.Row) -> str:
    return f"{row.verdict}: {row.reason}" if row.reason else str(row.verdict)


def _strong(row: judging.Row) -> str:
    return f"**{row.verdict}**" if row.verdict in _DECIDED else _verdict(row)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)

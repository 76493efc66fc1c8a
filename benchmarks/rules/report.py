"""Tables and chart of the benchmark, for the terminal and for the pages of docs/benchmark."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as RichTable

from agents.texts import quantity
from analysis.charts.chart import PALETTE
from analysis.metrics import ConfidenceInterval, t_interval
from benchmarks.papers.report import LINE, filled
from benchmarks.rules import ranks, results
from benchmarks.rules.definition import Benchmark, Condition
from benchmarks.rules.ranks import Scores
from benchmarks.rules.results import Cell

_MARKS = "osD^v*"
_ABOUT = textwrap.fill(
    "[How to read it](index.md#how-it-is-made). Ranks: the 95% interval over seeds (bootstrap) in "
    "brackets. Seconds: mean ± half of the 95% interval over seeds (Student's t); `> 21.8 (4 of 5)`: "
    "four of five runs reached the target, and the other counts with its end. Multiples: geometric mean "
    "over label skews and seeds, with the 95% interval over seeds; *slower*: at 5 % after Holm's "
    "correction.",
    LINE,
)
"""Text above the tables of a task."""


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """The finished conditions of a task."""

    benchmark: Benchmark
    task: str
    cells: tuple[Cell, ...]
    conditions: tuple[Condition, ...]
    """Conditions under which all rules have run with all seeds."""

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(self.benchmark.file.rules)

    @property
    def waiting(self) -> list[Condition]:
        return [one for one in self.benchmark.conditions(self.task) if one not in self.conditions]

    def scores(self, cost: ranks.Cost = "seconds") -> Scores:
        seeds = self.benchmark.file.seeds.compare
        return ranks.scores(self.cells, self.conditions, self.rules, seeds, cost)


def standing(benchmark: Benchmark, task: str, cells: Iterable[Cell]) -> Standing:
    cells = tuple(cells)
    seeds, rules = benchmark.file.seeds.compare, benchmark.file.rules
    done = results.complete(cells, seeds, rules)
    return Standing(benchmark, task, cells, tuple(c for c in benchmark.conditions(task) if c in done))


def tables(found: Standing) -> list[Table]:
    """Return the tables of a task; none if no condition is finished."""
    if not found.conditions:
        return []
    file = found.benchmark.file
    parts = [_overall(found), _by_fleet(found), _fastest(found)]
    skews = [skew for skew in file.skews if any(one.skew == skew for one in found.conditions)]
    return [*parts, *(_times(found, skew) for skew in skews)]


def _overall(found: Standing) -> Table:
    by_cost = {cost: ranks.mean_ranks(found.scores(cost)) for cost in ranks.COSTS}
    scored = found.scores()
    compared = found.benchmark.file.seeds.compare
    rows = []
    for rule in sorted(found.rules, key=lambda rule: by_cost["seconds"][rule].mean):
        index = found.rules.index(rule)
        own = [
            cell
            for cell in found.cells
            if cell.rule == rule and cell.seed in compared and cell.condition in found.conditions
        ]
        steps = sorted({cell.step for cell in own})
        rows.append(
            (
                rule,
                *(_interval(by_cost[cost][rule]) for cost in ranks.COSTS),
                f"{100 * scored.reached[:, index].mean():.0f}",
                f"{100 * float(np.mean([cell.accuracy for cell in own])):.1f}",
                f"{steps[0]:g}" if len(steps) == 1 else f"{steps[0]:g} to {steps[-1]:g}",
            )
        )
    by = ("rank by time", "by updates", "by bytes", "by joules")
    header = ("rule", *by, "reached %", "accuracy %", "step sizes")
    return Table("Mean ranks over all conditions", header, tuple(rows))


def _by_fleet(found: Standing) -> Table:
    fleets = _fleets(found)
    by_fleet = {fleet: ranks.mean_ranks(_of_fleet(found, fleet)) for fleet in fleets}
    order = ranks.mean_ranks(found.scores())
    rows = [
        (rule, *(_interval(by_fleet[fleet][rule]) for fleet in fleets))
        for rule in sorted(found.rules, key=lambda rule: order[rule].mean)
    ]
    return Table("Mean rank by time, by fleet", ("rule", *fleets), tuple(rows))


def _fastest(found: Standing) -> Table:
    """Which rules are fastest with each fleet, and which are as fast as one can tell."""
    rows = []
    for fleet in _fleets(found):
        behind = ranks.behind_fastest(_of_fleet(found, fleet))
        fastest, *others = behind
        equal = [_factor(rule, behind[rule]) for rule in others if not behind[rule].is_separable]
        slower = [_factor(rule, behind[rule]) for rule in others if behind[rule].is_separable]
        rows.append((fleet, fastest, ", ".join(equal) or "none", ", ".join(slower) or "none"))
    header = ("fleet", "fastest", "not separable from it", "slower")
    return Table("Time, as a multiple of the fastest rule's", header, tuple(rows))


def _times(found: Standing, skew: str) -> Table:
    scored = found.scores().only(lambda condition: condition.skew == skew)
    rows = [
        (rule, *(_time(scored.costs[i, r], scored.reached[i, r]) for i in range(len(scored.conditions))))
        for r, rule in enumerate(scored.rules)
    ]
    header = ("rule", *(condition.fleet for condition in scored.conditions))
    return Table(f"Seconds to the target, label skew: {skew}", header, tuple(rows))


def _fleets(found: Standing) -> list[str]:
    return list(dict.fromkeys(condition.fleet for condition in found.conditions))


def _of_fleet(found: Standing, fleet: str) -> Scores:
    return found.scores().only(lambda condition: condition.fleet == fleet)


def _interval(of: ConfidenceInterval) -> str:
    return f"{of.mean:.1f} ({of.low:.1f} to {of.high:.1f})"


def _factor(rule: str, behind: ranks.Behind) -> str:
    factor = behind.factor
    ends = "" if isnan(factor.low) else f" ({factor.low:.2g} to {factor.high:.2g})"
    return f"{rule} {factor.mean:.2g}{ends}"


def _time(seconds: ranks.Floats, reached: NDArray[np.bool_]) -> str:
    mean = float(seconds.mean())
    if reached.all():
        return f"{mean:.1f} ± {_half(seconds):.1f}" if len(seconds) > 2 else f"{mean:.1f}"
    return f"> {mean:.1f} ({int(reached.sum())} of {len(reached)})"


def _half(seconds: ranks.Floats) -> float:
    interval = t_interval(list(map(float, seconds)))
    return interval.high - interval.mean


def state(found: Standing) -> str:
    """Say which conditions are finished, how far the ranks differ, and which conditions wait."""
    done, waiting = found.conditions, found.waiting
    text = f"Benchmark {found.benchmark.version}, {found.task}: "
    text += f"{len(done)} of {quantity(len(done) + len(waiting), 'condition')} finished"
    if waiting:
        by_skew: dict[str, list[str]] = {}
        for condition in waiting:
            by_skew.setdefault(condition.skew, []).append(condition.fleet)
        left = "; ".join(f"label skew {skew}: {', '.join(fleets)}" for skew, fleets in by_skew.items())
        text += f". Waiting: {left}"
    if not done:
        return f"{text}."
    test = ranks.friedman(found.scores())
    if isfinite(test.p):
        text += (
            f". Friedman's test: p = {test.p:.1g}; critical difference of two mean ranks (Nemenyi, "
            f"5 %): {test.critical_difference:.1f}"
        )
    return f"{text}."


def show(table: Table, console: Console, marked: Sequence[str] = ()) -> None:
    """Print `table`; rows of the rules `marked` are bold."""
    shown = RichTable(title=table.title, title_justify="left", box=None, pad_edge=False)
    for index, name in enumerate(table.header):
        shown.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*row, style="bold" if row[0] in marked else "")
    console.print()
    console.print(shown)


def markdown(table: Table) -> str:
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return f"### {table.title}\n\n{lines}\n"


def chart(found: Standing) -> Figure:
    """Draw the mean ranks by time: the interval over seeds, the rank with each fleet, and the critical
    difference."""
    scored = found.scores()
    intervals = ranks.mean_ranks(scored)
    order = sorted(found.rules, key=lambda rule: intervals[rule].mean)
    figure = Figure(figsize=(7.2, 0.6 + 0.3 * len(order)), layout="constrained")
    axes = figure.subplots()
    colours = [colour for name, colour in PALETTE.items() if name != "grey"]
    for number, fleet in enumerate(_fleets(found)):
        own = _of_fleet(found, fleet).ranks.mean(axis=0)
        axes.scatter(
            [own[found.rules.index(rule)] for rule in order],
            range(len(order)),
            marker=_MARKS[number % len(_MARKS)],
            s=16,
            facecolors="none",
            edgecolors=colours[number % len(colours)],
            linewidths=0.9,
            label=fleet,
        )
    for place, rule in enumerate(order):
        one = intervals[rule]
        axes.plot([one.low, one.high], [place, place], color="black", linewidth=1.4, zorder=3)
        axes.plot(one.mean, place, "|", color="black", markersize=11, markeredgewidth=2, zorder=3)
    test = ranks.friedman(scored)
    best = intervals[order[0]].mean
    if isfinite(test.critical_difference):
        axes.axvspan(
            best,
            best + test.critical_difference,
            color=PALETTE["grey"],
            alpha=0.15,
            linewidth=0,
            zorder=0,
            label="critical difference",
        )
    axes.set_yticks(range(len(order)), order)
    axes.invert_yaxis()
    axes.set_xlim(0.5, len(order) + 0.5)
    axes.set_xlabel("mean rank by time to the target (1 is best)")
    axes.legend(fontsize=7, frameon=False, loc="lower left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def filled_index(page: str, found: Standing) -> str:
    """Return the index page with the summary of the task: state, chart and mean ranks. Raises
    BadInputError if it has no place for them."""
    parts = [textwrap.fill(state(found), LINE)]
    if found.conditions:
        parts += [f"![Mean ranks]({found.task}.png)", markdown(_overall(found))]
        parts.append(f"More: [{found.task}]({found.task}.md).")
    return filled(page, found.task, "\n\n".join(part.rstrip() for part in parts) + "\n")


def write_pages(found: Standing, folder: Path) -> None:
    """Write tables and chart of a task into `folder`: the summary into `index.md`, the rest into
    `TASK.md`. Raises BadInputError if a page has no place for them."""
    index, page = folder / "index.md", folder / f"{found.task}.md"
    index.write_text(filled_index(index.read_text(encoding="utf-8"), found), encoding="utf-8")
    if not (made := tables(found)):
        return
    chart(found).savefig(folder / f"{found.task}.png", dpi=110)
    begin, end = (f"<!-- {what} {found.task} -->" for what in ("begin", "end"))
    text = "\n".join(map(markdown, made[1:]))
    page.write_text(
        f"# Benchmark: {found.task}\n\n{begin}\n\n{_ABOUT}\n\n{text}\n{end}\n", encoding="utf-8"
    )

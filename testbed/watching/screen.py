"""One frame of the full-screen view of a run, as lines of text that fit on the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isnan
from typing import NamedTuple

from rich.text import Text

from agents import events
from agents.texts import quantity
from analysis.activity import (
    DOWNLOAD,
    OFFLINE,
    PAUSED,
    STATES,
    TRAIN,
    UNPOWERED,
    UPLOAD,
    WAIT,
    ActivityCell,
)
from analysis.features import STATE_NEEDS
from analysis.figures import FIGURES
from analysis.part import DeviceFigure
from analysis.tally import Tally
from testbed import console
from testbed.fidelity.validity import Validity, recorded_reasons
from testbed.watching.choices import HELP, Choices
from testbed.watching.rows import Overview, Row, in_order, rows


class _Style(NamedTuple):
    """Colours and signs of a state, which are distinguishable without colours."""

    colour: str
    named: str
    """Colour on a terminal with only sixteen colours."""
    signs: str
    """Two characters. The first is for known activity, the second for inferred activity."""
    ascii: str
    """Like `signs`, on a terminal that supports only ASCII."""


_STYLES = {
    # Okabe and Ito's colours, which colour-blind people can distinguish.
    DOWNLOAD: _Style("#56b4e9", "cyan", "▄▂", "dd"),
    TRAIN: _Style("#009e73", "green", "█▒", "#+"),
    UPLOAD: _Style("#e69f00", "yellow", "▀▔", "uu"),
    WAIT: _Style("grey50", "bright_black", "··", ".."),
    OFFLINE: _Style("#d55e00", "red", "××", "xx"),
    PAUSED: _Style("#cc79a7", "magenta", "==", "=="),
    UNPOWERED: _Style("#f0e442", "bright_yellow", "▁▁", "__"),
}
_WIDTHS = (60, 30, 20, 15, 12, 10)
"""Widths of a bar, in cells. They divide 60, so that each cell covers whole seconds."""
_ROOM = 9
"""Lines that are not rows: header 4, headings, messages 2, legend, help."""


@dataclass(slots=True)
class Screen:
    overview: Overview
    tally: Tally
    choices: Choices = field(default_factory=Choices)
    validity: Validity | None = None
    """Verdict on the host's load so far or, after the end, on the run; None if unknown."""
    outcome: str = ""
    """How the run ended; empty while it is running."""
    real: float | None = None
    """Seconds since the start of a run in virtual time; None for other runs."""
    messages: list[str] = field(default_factory=list)
    """The newest is last."""
    pinned: str = ""
    """Always shown."""
    ascii_only: bool = False
    named_colours: bool = False
    """The terminal supports only sixteen colours."""
    quit_help: str = "q quit"
    """First entry of the help line."""
    _top: int = 0
    """Index of the first visible row."""

    def page(self, height: int) -> int:
        """Rows that fit on a screen of `height` lines."""
        return max(1, height - _ROOM)

    def is_grouped(self, height: int) -> bool:
        """Unless the user has chosen, true if the devices do not fit on the screen."""
        by_user = self.choices.grouped
        return len(self.overview.devices) > self.page(height) if by_user is None else by_user

    def rows(self, at: float, height: int) -> list[Row]:
        """All rows, filtered and sorted, also those that do not fit."""
        choices, grouped = self.choices, self.is_grouped(height)
        matches = rows(self.tally, self.overview.devices, at, grouped=grouped, matching=choices.matching)
        return in_order(matches, choices.sort, reverse=choices.reverse)

    def frame(self, at: float, width: int, height: int) -> list[Text]:
        """At device time `at`: `height` lines, each shorter than `width` characters."""
        header = self._header(at)
        verdict = self._verdict(width - 1, max(1, height // 3))
        all_rows, page = self.rows(at, height), max(1, self.page(height) + 1 - len(verdict))
        shown = self._visible(all_rows, page)
        body = self._table(shown, at, width - 1, grouped=self.is_grouped(height))
        body += [Text()] * (page + 1 - len(body))
        lines = [*header, *verdict, *body, *self._foot(all_rows, shown)]
        for line in lines:
            line.truncate(width - 1)
        return lines[:height]

    def _visible(self, all_rows: Sequence[Row], page: int) -> Sequence[Row]:
        """A page that includes the selected row."""
        names = [row.name for row in all_rows]
        if self.choices.selected in names:
            index = names.index(self.choices.selected)
            self._top = min(max(self._top, index - page + 1), index)
        self._top = max(0, min(self._top, len(all_rows) - page))
        return all_rows[self._top : self._top + page]

    def _header(self, at: float) -> list[Text]:
        view, tally = self.overview, self.tally
        title = Text.assemble((view.rule, "bold"), f"  {view.run}  {view.runtime}")
        if self.outcome or not tally.started:
            title.append(f"  {self.outcome or 'starting'}", "bold")
        facts = (
            f"{self._time(at)}  version {tally.version}  {quantity(tally.updates, 'update')}  "
            f"{tally.rate(at):.1f}/s"
        )
        facts += f"  {tally.rejected} rejected" if tally.rejected else ""
        more = [named for part in tally.parts for named in part.headline(tally)]
        facts += "".join(f"  {text}" for name, text in more if not name)
        facts += f"  dilation {view.dilation:g}" if view.dilation != 1 else ""
        named = "".join(f"  {console.shorten(name)}: {text}" for name, text in more if name)
        return [title, Text(facts), Text(f"{quality_of(tally.evaluation)}{named}")]

    def _verdict(self, width: int, most: int) -> list[Text]:
        """Return the verdict with its reasons, in at most `most` lines."""
        validity, so_far = self.validity, ""
        if not self.outcome:
            so_far = " so far"
            if recorded := recorded_reasons(self.tally.doubtful):
                validity = Validity((*recorded, *(validity.reasons if validity else ())))
        if validity is None:
            return [Text()]
        why = validity.reasons or validity.unjudged
        colour = self._colour(OFFLINE) if validity.reasons else ""
        text = f"{validity.verdict}{so_far}{': ' if why else ''}{'; '.join(why)}"
        return [
            Text(line, colour) for line in textwrap.wrap(text, width, max_lines=most, placeholder=" …")
        ]

    @property
    def _states(self) -> tuple[str, ...]:
        return tuple(one for one in STATES if STATE_NEEDS.get(one, "") in self.overview.has)

    @property
    def _state_width(self) -> int:
        return max(map(len, self._states))

    def _time(self, at: float) -> str:
        stop = self.overview.stop
        time = f"{at:.1f} s" if stop.after is None else f"{at:.1f} s of {stop.after:g} s"
        progress = self.overview.progress(at, self.tally.updates)
        if progress and not self.outcome:
            time += f" ({progress:.0%})"
        if self.overview.is_virtual:
            real = (
                ()
                if self.real is None
                else (f"{self.real:.1f} s real", self._time_left(self.real, progress))
            )
            time += ", ".join(filter(None, (" virtual", *real)))
        return time

    def _time_left(self, real: float, progress: float) -> str:
        return "" if self.outcome else console.time_left(real, progress, 1.0)

    def _table(self, shown: Sequence[Row], at: float, width: int, *, grouped: bool) -> list[Text]:
        # Virtual time has no telemetry, and processes without links count no bytes.
        columns = [one for one in FIGURES.values() if one.title and one.needs in self.overview.has]
        longest = max([len("device"), *(len(row.label) for row in shown)])
        room = width - self._state_width
        name, bar = _widths(columns, longest, room)
        without = [column for column in columns if column.title != "mem"]
        if _widths(without, longest, room) != (name, bar):  # memory is shown only if space is left
            columns = without
            name, bar = _widths(columns, longest, room)
        giving_way = sorted((one for one in columns if one.gives_way), key=lambda one: one.gives_way)
        for column in giving_way:
            if name + bar + _width(columns) > room:
                columns = [one for one in columns if one is not column]
                name, bar = _widths(columns, longest, room)
        what, how = ("group", "online") if grouped else ("device", "state")
        head = Text(f"  {what:<{name}} {how:<{self._state_width}} {'last 60 s':<{bar}}", "bold")
        for column in columns:
            sorted_by = bool(column.sort) and column.title == self.choices.sort
            head.append(f" {column.title:>{column.width}}", "underline" if sorted_by else "")
        return [head, *(self._row(row, at, name, bar, columns) for row in shown)]

    def _row(self, row: Row, at: float, name: int, bar: int, columns: Sequence[DeviceFigure]) -> Text:
        selected = row.name == self.choices.selected
        label = console.shorten(row.label, name)
        line = Text(f"{'>' if selected else ' '} {label:<{name}} ", "bold" if selected else "")
        state, colour = row.state, self._colour(row.state)
        if row.grouped:
            state = f"{row.online}/{len(row.devices)}"
            colour = "" if row.online == len(row.devices) else self._colour(OFFLINE)
        line.append(f"{state[: self._state_width]:<{self._state_width}} ", colour)
        line.append_text(self._bar(row, at, bar))
        for column in columns:
            line.append(f" {column.text(row.figures[column.name]):>{column.width}}")
        return line

    def _bar(self, row: Row, at: float, width: int) -> Text:
        """States over time; for groups, or if the user chose it, the share of each."""
        activities = [self.tally.devices[device].activity for device in row.devices]
        if not row.grouped and not self.choices.stacked:
            cells = activities[0].cells(at, width)
        else:
            shares = [activity.shares(at) for activity in activities]
            cells = stacked({state: sum(each[state] for each in shares) for state in STATES}, width)
        bar = Text()
        for cell, same in groupby(cells):
            sign, colour = (" ", "") if cell is None else self._sign(cell)
            bar.append(sign * len(list(same)), colour)
        return bar

    def _sign(self, cell: ActivityCell) -> tuple[str, str]:
        style = _STYLES[cell.state]
        return (style.ascii if self.ascii_only else style.signs)[cell.inferred], self._colour(cell.state)

    def _colour(self, state: str) -> str:
        style = _STYLES[state]
        return style.named if self.named_colours else style.colour

    def _foot(self, all_rows: Sequence[Row], shown: Sequence[Row]) -> list[Text]:
        texts = [self.pinned, *self.messages[-1:]] if self.pinned else self.messages[-2:]
        messages = [Text(text) for text in texts]
        return [*[Text()] * (2 - len(messages)), *messages, self._legend(all_rows, shown), self._help()]

    def _legend(self, all_rows: Sequence[Row], shown: Sequence[Row]) -> Text:
        legend = Text()
        if len(shown) < len(all_rows):
            legend.append(f"{self._top + 1}–{self._top + len(shown)} of {len(all_rows)}  ")
        for state in self._states:
            legend.append(*self._sign(ActivityCell(state, inferred=False)))
            legend.append(f" {state} ")
        legend.append(*self._sign(ActivityCell(TRAIN, inferred=True)))
        legend.append(" inferred")
        return legend

    def _help(self) -> Text:
        choices = self.choices
        if choices.unconfirmed is not None:
            return Text(f"{choices.unconfirmed}? y: yes, any other key: no", "bold")
        if choices.typing:
            return Text(f"filter: {choices.matching}_  Enter: keep it, Esc: all rows", "bold")
        active = f"filter: {choices.matching} (Esc: all)  " if choices.matching else ""
        return Text.assemble((active, "bold"), (f"{self.quit_help}  {HELP}", "dim"))


def _widths(columns: Sequence[DeviceFigure], longest: int, width: int) -> tuple[int, int]:
    """Return the width of names and the width of bars. The longest name has `longest` characters.
    `width`: width of the table without the states."""
    room = width - _width(columns)
    name = min(16, longest, max(8, room - _WIDTHS[-1]))
    return name, next((cells for cells in _WIDTHS if cells <= room - name), _WIDTHS[-1])


def _width(columns: Sequence[DeviceFigure]) -> int:
    """Return the width of the table without names, states and bars."""
    return 2 + 1 + 1 + sum(1 + column.width for column in columns)


def stacked(seconds: dict[str, float], width: int) -> list[ActivityCell | None]:
    """`width` cells, in proportion to the seconds of each state (largest remainder method)."""
    total = sum(seconds.values())
    if total <= 0:
        return [None] * width
    exact = {state: width * spent / total for state, spent in seconds.items()}
    cells = {state: int(share) for state, share in exact.items()}
    left = width - sum(cells.values())
    for state in sorted(exact, key=lambda state: cells[state] - exact[state])[:left]:
        cells[state] += 1
    return [ActivityCell(state, inferred=False) for state, count in cells.items() for _ in range(count)]


def quality_of(evaluation: events.Evaluated | None) -> str:
    if evaluation is None:
        return "accuracy     –  loss     –"
    if isnan(evaluation.accuracy):  # the task has none
        return f"loss {evaluation.loss:8.4g}"
    return f"accuracy {evaluation.accuracy:5.1%}  loss {evaluation.loss:5.3f}"

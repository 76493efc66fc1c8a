"""View of a run as lines of text, and the summary at its end.

For files, pipes and CI, at most about one line per second. On a terminal, `testbed.watching.fullscreen`
is used instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from agents import events
from analysis.part import Notice, decimal, percent
from analysis.tally import merge_notices
from testbed import console
from testbed.fidelity.validity import Judgement, Validity
from testbed.view import View
from testbed.watching.rows import Overview
from testbed.watching.screen import quality_of

if TYPE_CHECKING:  # imports pandas, which takes a second: only at the end of a run
    from analysis.load import Run

_RARE = ("paused", "offline")
"""Columns of the summary that are left out if no device was in this state."""
_MAX_ROWS = 20
"""Above this number of devices, a row of the summary is a group."""
_PRINT_INTERVAL_SECONDS = 1.0
"""Minimum seconds between two lines."""
_SECTIONS = 10
"""A run in virtual time prints a line per section, even if that takes very little real time."""


class LiveView(View):
    """Shows the events of a run as plain lines, in a context."""

    stays = False
    """True if the view stays open after the end of the run."""

    def __init__(self, console: Console, overview: Overview) -> None:
        self._console = console
        self._overview = overview
        self._tally = overview.tally()
        self._notices: list[Notice] = []
        self._notices_due: float | None = None
        self._printed_evaluation: events.Evaluated | None = None
        self._printed_at, self._printed_section = 0.0, 0
        """Monotonic time and section of the run of the last evaluation that was printed."""
        self._begun = 0.0
        """Start of the run clock, on the monotonic clock."""
        self._outcome = ""
        """How the watched run ended; empty while it is running."""
        self.quit = False
        self.judgement: Judgement | None = None
        """None before the end of the run, and if the run was not judged."""

    def __exit__(self, *_: object) -> None:
        self._print_notices()
        if self._outcome and self._tally.ended is None:  # there is no record of its end
            self._print(f"{self._tally.at:8.1f} s  {self._outcome}")

    def progress(self, message: str) -> None:
        self._print(message)

    def keep(self, message: str) -> None:
        """Information that the user needs throughout the run."""
        self._print(message)

    def past(self, records: Sequence[events.Record]) -> None:
        """Count records without showing them."""
        for record in records:
            self._tally.add(record)
        self._tally.started = False

    def record(self, record: events.Record) -> None:
        if isinstance(record, events.RunStarted):
            self._begun = time.monotonic()
        notice = self._tally.add(record)
        if notice is not None:
            self._notices.append(notice)
        if isinstance(record, events.RunEnded):  # all devices leave at the end; do not report it
            self._notices = [n for n in self._notices if n.what != "offline"]
            self._print_notices()
            self._finished(record)
        elif isinstance(record, events.Evaluated):
            self._evaluated(record)

    def refresh(self, now: float) -> None:
        if not self._tally.started:
            return
        if self._notices and self._notices_due is None:
            self._notices_due = (
                now + _PRINT_INTERVAL_SECONDS
            )  # so that simultaneous notices share a line
        if self._notices_due is not None and now >= self._notices_due:
            self._print_notices()

    def judged(self, judgement: Judgement) -> None:
        self.judgement = judgement

    def over(self, outcome: str, validity: Validity | None) -> None:
        """An empty `outcome` means that the run is running, or has been resumed."""
        self._outcome = outcome

    def take_keys(self, timeout: float) -> None:
        """`timeout`: seconds. This view has no keys, so it only waits."""
        time.sleep(timeout)

    def _print(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _print_notices(self) -> None:
        for notice in merge_notices(self._notices):
            self._print(f"{notice.at:8.1f} s  {notice.what}: {notice.detail}")
        self._notices, self._notices_due = [], None

    def _evaluated(self, evaluation: events.Evaluated) -> None:
        """Unless the last evaluation was printed only shortly before."""
        last = self._printed_evaluation
        if last is None or self._is_due(evaluation, last):
            self._print_evaluation(evaluation)

    def _is_due(self, evaluation: events.Evaluated, last: events.Evaluated) -> bool:
        if not self._overview.is_virtual:
            return evaluation.at >= last.at + _PRINT_INTERVAL_SECONDS
        passed = time.monotonic() - self._printed_at
        return passed >= _PRINT_INTERVAL_SECONDS or self._section(evaluation.at) > self._printed_section

    def _finished(self, ended: events.RunEnded) -> None:
        """Print the last evaluation, if that was not done yet, and how the run ended."""
        last = self._tally.evaluation
        if last is not None and last is not self._printed_evaluation:
            self._print_evaluation(last)
        self._print(f"{ended.at:8.1f} s  ended: {events.end_reason(ended.reason)}")

    def _print_evaluation(self, evaluation: events.Evaluated) -> None:
        self._print_notices()  # earlier notices first
        self._printed_evaluation = evaluation
        self._printed_at, self._printed_section = time.monotonic(), self._section(evaluation.at)
        tally = self._tally
        self._print(
            f"{evaluation.at:8.1f} s  version {evaluation.version:5}  {quality_of(evaluation)}  "
            f"updates {tally.updates_in(evaluation.version):5}  {tally.rate(evaluation.at):5.1f}/s"
            f"{self._time_left(evaluation.at)}"
        )

    def _time_left(self, at: float) -> str:
        """Text for a run in virtual time; empty for others."""
        progress = self._progress(at) if self._overview.is_virtual else 0.0
        left = console.time_left(time.monotonic() - self._begun, progress, 1.0)
        return f"  {left}" if left else ""

    def _section(self, at: float) -> int:
        return int(_SECTIONS * self._progress(at))

    def _progress(self, at: float) -> float:
        return self._overview.progress(at, self._tally.updates)


class QuietView(LiveView):
    """Prints only the messages to keep, on standard error."""

    def keep(self, message: str) -> None:
        console.err().print(message, soft_wrap=True)

    def _print(self, message: str) -> None:
        pass


def render_summary(run: Run) -> RenderableType:
    """A table of the devices, and the accuracy reached."""
    from analysis import features, summary

    rows = summary.devices(run)
    if len(rows) > _MAX_ROWS:
        rows = summary.groups(rows)
        rows.index = [f"{name} ×{n}" for name, n in zip(rows.index, rows["count"], strict=True)]
    shares = [name for name in summary.SHARES if name not in _RARE or (rows[name] > 0).any()]
    more = {one.name: one.title for one in features.SUMMARY if one.title and one.name in rows}
    table = console.number_table(
        "device", "profile", "updates", "share", "staleness", *shares, *more.values()
    )
    table.padding = (0, 1, 0, 0)  # so that it fits in 80 columns; long profiles are wrapped
    table.columns[1].no_wrap = False
    for name, row in rows.iterrows():
        table.add_row(
            console.shorten(str(name)),
            str(row["profile"] or "–"),
            str(row["updates"]),
            percent(row["share"]),
            decimal(row["staleness"], 1),
            *(percent(row[name]) for name in shares),
            *(decimal(row[name], 1) for name in more),
        )
    line = summary.headline(run)
    ended = "not ended" if line.ended is None else events.end_reason(line.ended)
    facts = f"{line.applied}, {line.duration:.1f} s ({ended})"
    facts += "".join(f", {name} {text}" for name, text in features.facts(run).items())
    result = Text.assemble((line.rule, "bold"), f": {line.quality}")
    unused = summary.unused_devices(run)
    return Group(Text(), table, Text(), result, Text(facts), *([Text(unused)] if unused else []))

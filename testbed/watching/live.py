"""What the user sees of a run: while it goes, from its events, and when it has ended.

Here as lines, one per evaluation: in a file, a pipe, CI. On a terminal: `testbed.watching.fullscreen`.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.text import Text

from agents import events
from testbed import console
from testbed.fidelity.validity import Judgement, Validity
from testbed.view import View
from testbed.watching.overview import Overview
from testbed.watching.screen import number, percent, quality_of
from testbed.watching.tally import Notice, merged

if TYPE_CHECKING:  # it imports pandas: a second that only the end of a run pays
    from analysis.load import Run

_MOST_ROWS = 20  # a summary of more devices is by group
_SAY_EVERY = 1.0  # seconds; lines come no faster


class LiveView(View):
    """A context manager that is told everything and shows what helps: here, as plain lines."""

    stays = False
    """Whether the end of a run is for looking at."""

    def __init__(self, console: Console, overview: Overview) -> None:
        self._console = console
        self._overview = overview
        self._tally = overview.tally()
        self._notices: list[Notice] = []
        self._notices_due: float | None = None
        self._said: events.Evaluated | None = None
        self.quit = False
        """The user wants no more of it."""
        self.judgement: Judgement | None = None
        """Of the run, once it is over; None where there is none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._say_notices()

    def progress(self, message: str) -> None:
        """Say how launching and ending go on."""
        self._say(message)

    def keep(self, message: str) -> None:
        """Say what is of use as long as the run goes."""
        self._say(message)

    def record(self, record: events.Record) -> None:
        notice = self._tally.take(record)
        if notice is not None:
            self._notices.append(notice)
        if isinstance(record, events.RunEnded):  # all devices leave then, which is no news
            self._notices = [n for n in self._notices if n.what != "offline"]
            self._say_notices()
            self._finished(record)
        elif isinstance(record, events.Evaluated):
            self._evaluated(record)

    def refresh(self, now: float, at: float | None = None) -> None:
        """Call it some times a second. `now` is any steady clock, in seconds; `at` is device time, where
        that is not to be had from `now` and when the run's clock was first seen to go."""
        if not self._tally.started:
            return
        if self._notices and self._notices_due is None:
            self._notices_due = now + _SAY_EVERY  # those that come together share a line
        if self._notices_due is not None and now >= self._notices_due:
            self._say_notices()

    def judged(self, judgement: Judgement) -> None:
        self.judgement = judgement

    def over(self, outcome: str, judged: Validity | None = None) -> None:
        """The run that is watched goes on no more; or, for no `outcome`, it goes on (again)."""

    def take_keys(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for keys, and do what they say. Lines have none."""
        time.sleep(timeout)

    def _say(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _say_notices(self) -> None:
        for notice in merged(self._notices):
            self._say(f"{notice.at:8.1f} s  {notice.what}: {notice.detail}")
        self._notices, self._notices_due = [], None

    def _evaluated(self, evaluation: events.Evaluated) -> None:
        """One aligned line, if the last one was not just before."""
        if self._said is None or evaluation.at >= self._said.at + _SAY_EVERY:
            self._say_evaluation(evaluation)

    def _finished(self, ended: events.RunEnded) -> None:
        """The last evaluation in any case, and why it is the last."""
        last = self._tally.evaluation
        if last is not None and last is not self._said:
            self._say_evaluation(last)
        self._say(f"{ended.at:8.1f} s  ended: {events.ended_by(ended.reason)}")

    def _say_evaluation(self, evaluation: events.Evaluated) -> None:
        self._say_notices()  # what was before it stands before it
        self._said = evaluation
        tally = self._tally
        self._say(
            f"{evaluation.at:8.1f} s  version {evaluation.version:5}  {quality_of(evaluation)}  "
            f"updates {tally.updates_in(evaluation.version):5}  {tally.rate(tally.at):5.1f}/s"
        )


def render_summary(run: Run) -> RenderableType:
    """What the run came to: a table per device, and the accuracy reached."""
    from analysis import summary

    rows = summary.devices(run)
    if len(rows) > _MOST_ROWS:
        rows = summary.groups(rows)
        rows.index = [f"{name} ×{n}" for name, n in zip(rows.index, rows["count"], strict=True)]
    table = console.plain("device", "profile", "updates", "share", "mean staleness", "busy", "idle")
    for name, row in rows.iterrows():
        table.add_row(
            console.short(str(name)),
            str(row["profile"] or "–"),
            str(row["updates"]),
            percent(row["share"]),
            number(row["staleness"], 1),
            percent(row["busy"]),
            percent(row["idle"]),
        )
    line = summary.headline(run)
    ended = "not ended" if line.ended is None else events.ended_by(line.ended)
    facts = f"{line.updates} updates in {line.versions} versions, {line.duration:.1f} s ({ended})"
    came_to = Text.assemble((line.rule, "bold"), f": {line.quality}")
    return Group(Text(), table, Text(), came_to, Text(facts))

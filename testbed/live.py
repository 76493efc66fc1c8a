"""What the user sees of a run: while it goes, from its events, and when it has ended.

On a terminal a table that is drawn anew; elsewhere (a file, a pipe, CI) one line per evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agents import events
from agents.config import Stop
from testbed import tables
from testbed.plan import PlannedDevice
from testbed.tally import DeviceTally, Notice, Tally, merged

if TYPE_CHECKING:  # it imports pandas: a second that only the end of a run pays
    from analysis.load import Run

_MOST_ROWS = 20  # more devices than this, or than fit on the screen, are shown by group
_HEADER = 5  # lines that a screen needs beside its rows
_DRAW_EVERY = 0.25  # seconds
_SAY_EVERY = 1.0  # seconds; lines come no faster
_REASONS = {
    "after": "stop.after reached",
    "updates": "stop.updates reached",
    "target_accuracy": "stop.target_accuracy reached",
}


class Follower:
    """Reads a growing `events.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[events.Record]:
        """The records that are new since the last call; a line still being written waits for the next.

        Raises ValueError, naming the file, for a line that is no record.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                lines = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        if not lines:
            return []
        self._offset += len(lines) + 1
        try:
            records = [events.from_line(line) for line in lines.decode().split("\n")]
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from error
        return [record for record in records if record is not None]


@dataclass(frozen=True, slots=True)
class Overview:
    """What is known of a run before it begins."""

    rule: str
    stop: Stop
    devices: tuple[PlannedDevice, ...]
    virtual: bool = False
    """Whether the clock is simulated: device time goes as fast as it can be computed."""


class LiveView:
    """A context manager that is told everything and shows what helps: here, as plain lines."""

    def __init__(self, console: Console, overview: Overview) -> None:
        self._console = console
        self._overview = overview
        self._tally = Tally({device.name: DeviceTally() for device in overview.devices})
        self._notices: list[Notice] = []
        self._notices_due: float | None = None
        self._epoch: float | None = None
        self._real = 0.0
        self._said: events.Evaluated | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._say_notices()

    def progress(self, message: str) -> None:
        """Say how launching and ending go on."""
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

    def refresh(self, now: float) -> None:
        """Call it some times a second. `now` is any steady clock, in seconds."""
        if not self._tally.started:
            return
        if self._epoch is None:
            self._epoch = now - (0.0 if self._overview.virtual else self._tally.at)
        self._real = now - self._epoch
        if self._notices and self._notices_due is None:
            self._notices_due = now + _SAY_EVERY  # those that come together share a line
        if self._notices_due is not None and now >= self._notices_due:
            self._say_notices()
        ended, simulated = self._tally.ended, self._overview.virtual
        running = self._tally.at if simulated else max(self._tally.at, now - self._epoch)
        self._draw(ended.at if ended else running, now)

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
        self._say(f"{ended.at:8.1f} s  ended: {_REASONS.get(ended.reason, ended.reason)}")

    def _say_evaluation(self, evaluation: events.Evaluated) -> None:
        self._said = evaluation
        tally = self._tally
        self._say(
            f"{evaluation.at:8.1f} s  version {evaluation.version:5}  {_quality(evaluation)}  "
            f"updates {tally.updates_in(evaluation.version):5}  {tally.rate(tally.at):5.1f}/s"
        )

    def _draw(self, at: float, now: float) -> None:
        """Bring what is drawn up to device time `at`: lines have nothing to draw."""


class TerminalView(LiveView):
    """A header and a table at the bottom of the terminal; everything else scrolls above."""

    def __init__(self, console: Console, overview: Overview) -> None:
        super().__init__(console, overview)
        self._live = Live(console=console, auto_refresh=False)
        self._drawn = -_DRAW_EVERY

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._live.transient = error is None  # the summary takes its place, if there will be one
        self._live.stop()

    def _evaluated(self, evaluation: events.Evaluated) -> None:
        """The header shows it."""

    def _finished(self, ended: events.RunEnded) -> None:
        """The summary says it."""

    def _draw(self, at: float, now: float) -> None:
        if now < self._drawn + _DRAW_EVERY:
            return
        self._drawn = now
        self._live.start()
        self._live.update(self.render(at), refresh=True)

    def render(self, at: float) -> RenderableType:
        """The screen at device time `at`, in seconds."""
        table = _device_table(self._rows(), self._tally.updates)
        bar = [self._bar(at)] if self._overview.virtual else []
        return Group(Text(), self._header(at), *bar, table)

    def _bar(self, at: float) -> RenderableType:
        """How much of the way to the end is gone, by the stop condition that is nearest to it."""
        stop, tally = self._overview.stop, self._tally
        gone = [0.0 if stop.after is None else at / stop.after]
        gone += [0.0 if stop.updates is None else tally.updates / stop.updates]
        bar = ProgressBar(total=1.0, completed=min(1.0, max(gone)), width=60)
        return Padding(bar, 0)  # a line of its own

    def _header(self, at: float) -> Text:
        tally, after = self._tally, self._overview.stop.after
        time = f"{at:.1f} s" if after is None else f"{at:.1f} of {after:g} s"
        if self._overview.virtual:
            time += f" virtual, {self._real:.1f} s real"
        progress = (
            time,
            f"version {tally.version}",
            f"{tally.updates} updates",
            f"{tally.rate(at):.1f}/s",
        )
        rejected = f"  {tally.rejected} rejected" if tally.rejected else ""
        return Text.assemble(
            (self._overview.rule, "bold"), "  ", "  ".join(progress), rejected, "\n",
            _quality(tally.evaluation),
        )  # fmt: skip

    def _rows(self) -> Iterator[tuple[str, float | None, Sequence[DeviceTally]]]:
        """Name, CPU share and tallies of each row: a device, or a group of equal ones."""
        devices, tallies = self._overview.devices, self._tally.devices
        if len(devices) <= min(_MOST_ROWS, self._console.height - _HEADER):
            for device in devices:
                yield device.name, device.cpu, [tallies[device.name]]
            return
        groups: dict[str, list[PlannedDevice]] = {}
        for device in devices:
            groups.setdefault(device.group, []).append(device)
        for name, members in groups.items():
            yield f"{name} ×{len(members)}", members[0].cpu, [tallies[m.name] for m in members]


def view(console: Console, overview: Overview) -> LiveView:
    """The view that fits where `console` writes to."""
    return (TerminalView if console.is_terminal else LiveView)(console, overview)


def render_summary(run: Run) -> RenderableType:
    """What the run came to: a table per device, and the accuracy reached."""
    from analysis import summary

    rows = summary.devices(run)
    if len(rows) > _MOST_ROWS:
        rows = summary.groups(rows)
        rows.index = [f"{name} ×{n}" for name, n in zip(rows.index, rows["count"], strict=True)]
    table = tables.plain("device", "profile", "updates", "share", "mean staleness", "busy", "idle")
    for name, row in rows.iterrows():
        table.add_row(
            tables.short(str(name)),
            str(row["profile"] or "–"),
            str(row["updates"]),
            _percent(row["share"]),
            _number(row["staleness"], 1),
            _percent(row["busy"]),
            _percent(row["idle"]),
        )
    line = summary.headline(run)
    quality = f"accuracy {line.accuracy:.1%} (best {line.best_accuracy:.1%}), loss {line.loss:.3g}"
    if isnan(line.accuracy):  # a task may have none
        quality = "never evaluated" if isnan(line.loss) else f"loss {line.loss:.6g}"
    ended = "not ended" if line.ended is None else _REASONS.get(line.ended, line.ended)
    facts = f"{line.updates} updates in {line.versions} versions, {line.duration:.1f} s ({ended})"
    return Group(Text(), table, Text(), Text.assemble((line.rule, "bold"), f": {quality}"), Text(facts))


def _device_table(rows: Iterator[tuple[str, float | None, Sequence[DeviceTally]]], total: int) -> Table:
    table = tables.plain("device", "cpu", "state", "updates", "share", "staleness", "mean", "training")
    for name, cpu, members in rows:
        updates = sum(m.updates for m in members)
        staleness = sum(m.staleness_sum for m in members) / updates if updates else nan
        last = members[0].staleness if len(members) == 1 and updates else nan
        trained = [m.training for m in members if not isnan(m.training)]
        training = sum(trained) / len(trained) if trained else nan
        table.add_row(
            tables.short(name),
            "–" if cpu is None else f"{cpu:g}",
            _state(members),
            str(updates),
            _percent(updates / total if total else nan),
            _number(last, 0),
            _number(staleness, 1),
            _number(training, 2, " s"),
        )
    return table


def _state(members: Sequence[DeviceTally]) -> Text:
    online = sum(m.state == "online" for m in members)
    text = members[0].state if len(members) == 1 else f"{online}/{len(members)} on"
    return Text(text, style="" if online == len(members) else "red")


def _quality(evaluation: events.Evaluated | None) -> str:
    if evaluation is None:
        return "accuracy     –  loss     –"
    if isnan(evaluation.accuracy):  # the task has none
        return f"loss {evaluation.loss:8.4g}"
    return f"accuracy {evaluation.accuracy:5.1%}  loss {evaluation.loss:5.3f}"


def _percent(value: float) -> str:
    return "–" if isnan(value) else f"{value:.0%}"


def _number(value: float, decimals: int, unit: str = "") -> str:
    return "–" if isnan(value) else f"{value:.{decimals}f}{unit}"

"""Who watches a run: what is told of it while it goes, and when it is over."""

from __future__ import annotations

from agents import events
from testbed.fidelity.validity import Judgement


class View:
    """Lets everything pass: override what is of interest."""

    def progress(self, message: str) -> None:
        """How launching and ending go on."""

    def record(self, record: events.Record) -> None:
        """The next record of the run's events."""

    def refresh(self, now: float) -> None:
        """Called some times a second; `now` is a steady clock, in seconds of device time."""

    def judged(self, judgement: Judgement) -> None:
        """The run is over, however it ended, and had devices to measure: virtual time has none."""

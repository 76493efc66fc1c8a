"""The interface of what displays a run: what a run reports while it goes on, and at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from agents import events
from testbed.fidelity.validity import Judgement


class View:
    """Ignores everything: override what is of interest. A context manager around a run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def progress(self, message: str) -> None:
        """The progress of launching and ending."""

    def keep(self, message: str) -> None:
        """What stays useful throughout the run, or is told at its end."""

    def past(self, records: Sequence[events.Record]) -> None:
        """The records of the earlier segments of a run that goes on."""

    def record(self, record: events.Record) -> None:
        """The next record of the run's events."""

    def refresh(self, now: float) -> None:
        """Called several times a second; `now` is a steady clock, in seconds of device time."""

    def judged(self, judgement: Judgement) -> None:
        """The run is over, however it ended, and had devices to measure: virtual time has none."""

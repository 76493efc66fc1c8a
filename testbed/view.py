"""Interface of a display of a run: the calls that a run makes while it runs and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from agents import events
from testbed.fidelity.validity import Judgement


class View:
    """Display that shows nothing. A subclass overrides the methods for what it shows. A display is a
    context manager around a run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def progress(self, message: str) -> None:
        """Show a line on launching or ending."""

    def keep(self, message: str) -> None:
        """Show a line that remains useful for the whole run, or after it."""

    def past(self, records: Sequence[events.Record]) -> None:
        """Records of the earlier legs of a resumed run."""

    def record(self, record: events.Record) -> None: ...

    def refresh(self, now: float) -> None:
        """A run calls this several times a second. `now`: reading of the monotonic clock, in seconds of
        device time."""

    def judged(self, judgement: Judgement) -> None:
        """Called when a run is over, but not in virtual time, which measures no devices."""

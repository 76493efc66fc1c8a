"""Interface of what takes part in the aggregator's core beside the rule: the server halves of the
pipeline's steps, and the draws of clients. No I/O and no clock.

A part is saved in checkpoints with the core (`agents.aggregator.storage`). Every method does nothing by
default. `core` is the core that calls, as its parts use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from agents import events
from agents.aggregator.actions import Action
from agents.rules import interface as rules
from agents.rules.interface import Update
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.payloads import UpdateMessage

if TYPE_CHECKING:
    from agents.aggregator.dispatches import Arrivals
    from agents.aggregator.inputs import Settings
    from agents.aggregator.progress import Timers


class PartHost(Protocol):
    settings: Settings
    server: rules.Server
    rule: rules.State
    timers: Timers
    arrivals: Arrivals

    @property
    def ended(self) -> Nanoseconds | None:
        """Device time at which the run ended; None if it has not."""

    def carry_out(self, returned: rules.Actions, at: Nanoseconds) -> list[Action]:
        """Check and perform what the rule has returned for an input that is no update."""

    def lose_update(self, client: str, dispatch: int, reason: str, at: Nanoseconds) -> list[Action]:
        """Record that an update is lost after the rule has used it. If the client remembers what it
        sent, its next model says so."""

    def refuse(self, client: str, reason: str, at: Nanoseconds) -> list[Action]:
        """Record, within the rate limit, that a message of `client` is refused."""


class CorePart:
    @property
    def waits(self) -> bool:
        """Whether the rule waits for this part, so that silence of the clients is no stall."""
        return False

    def begin_input(self, at: Nanoseconds) -> None:
        """The core begins to handle an input of device time `at`."""

    def note_record(self, record: events.Record) -> None:
        """The shell has made `record`, such as that of a round's energy."""

    def note_join(self, client: str) -> None:
        """`client` has joined, or its process was started again when the run resumed."""

    def note_update(self, update: Update, message: UpdateMessage, core: PartHost) -> None:
        """A valid update is about to be passed to the rule."""

    def drop_update(self, client: str, dispatch: int) -> None:
        """The update that answered `dispatch` will not be applied."""

    def after_rule(self, at: Nanoseconds, core: PartHost) -> list[Action]:
        """The rule has returned its actions; those of this part come before them."""
        return []

    def lose_process(self, client: str, at: Nanoseconds, core: PartHost) -> list[Action]:
        """The process of `client` has ended, with what it kept in memory."""
        return []

    def receive_answer(
        self, client: str, message: bytes | bytearray, at: Nanoseconds, core: PartHost
    ) -> list[Action]:
        """Handle the answer of `client` to a request of this part."""
        return []

    def fire(self, name: str, number: int, at: Nanoseconds, core: PartHost) -> list[Action]:
        """Handle the timer `("part", name, number)`, if this part has set it."""
        return []

    def problems(self, core: PartHost) -> Iterator[str]:
        """Yield a sentence for each inconsistency of the state."""
        yield from ()

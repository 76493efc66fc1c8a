"""The draws of a run: what the server knows about clients, the selection's memory, and the records. No
I/O and no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from agents import events, user_code
from agents.aggregator.actions import Action, Log
from agents.aggregator.part import CorePart, PartHost
from agents.checks import DeclarationError
from agents.config import Named
from agents.energy.messages import RoundEnergy
from agents.rules.interface import RuleDraw, Update
from agents.selection import SELECTIONS
from agents.selection.interface import ClientSelection, ClientView, Draw, ServerView
from agents.texts import quantity
from agents.timing.nanoseconds import SECOND, Nanoseconds, to_seconds
from agents.wire.payloads import UpdateMessage

REDRAW_EVERY = 10 * SECOND
"""Nanoseconds of device time after which a draw is repeated that chose too few clients."""
_LONG_WAIT = 86_400 * SECOND
"""A run waits this long for an eligible client before it counts as stuck."""
_SHOWN = 80
"""Maximum number of characters of a wrong value in an error."""


_REDRAW = "redraw"
"""Name of the timer at which a draw is repeated."""


def begin_draws(selection: Named, importance: Mapping[str, float], samples: Mapping[str, int]) -> Draws:
    """Raises any exception of user code. The other arguments are those of `Draws`."""
    made = user_code.build(selection, SELECTIONS, ClientSelection)
    return Draws(selection.name, made, importance, samples)


class Draws(CorePart):
    """Rules draw by `agents.rules.interface.Server.draw`."""

    def __init__(
        self,
        name: str,
        selection: ClientSelection,
        importance: Mapping[str, float],
        samples: Mapping[str, int],
    ) -> None:
        """`name`: in the topology. `importance`: of each client, in device order. `samples`: for
        training."""
        self.name = name
        self._selection = selection
        self.view = ServerView({c: ClientView(p, samples.get(c, 1)) for c, p in importance.items()})
        self.now: Nanoseconds = 0
        """Device time of the present input."""
        self._none_since: Nanoseconds | None = None
        """Since when draws have chosen nobody; None if the last one chose a client."""
        self._is_unfilled = False
        """A draw since the last `pop_records` chose fewer clients than the rule wanted and were idle."""
        self._eligible: dict[str, None] = {}
        """Clients that were eligible at the last draw."""
        self._records: list[events.ClientsDrawn | events.Note] = []

    @property
    def waits(self) -> bool:
        """The last draw chose nobody, but not yet for a day."""
        return self._none_since is not None and self.now - self._none_since < _LONG_WAIT

    def begin_input(self, at: Nanoseconds) -> None:
        self.now = at

    def note_record(self, record: events.Record) -> None:
        if isinstance(record, RoundEnergy):
            self.note_battery(record.client, record.level, record.at)

    def note_update(self, update: Update, message: UpdateMessage, core: PartHost) -> None:
        """An update that waited on the device until it was requested counts without this wait."""
        waits = core.settings.side.send_buffer is not None
        wait = max(0, message.sent - message.train_end) if waits else 0
        took, staleness = max(0, update.round_trip - wait), core.server.staleness(update)
        self.note_round(update.client, loss=message.loss, took=took, staleness=staleness)

    def after_rule(self, at: Nanoseconds, core: PartHost) -> list[Action]:
        records, is_unfilled = self.pop_records()
        if is_unfilled:
            core.timers.set(("part", _REDRAW, 0), at + REDRAW_EVERY)
        return [Log(record) for record in records]

    def fire(self, name: str, number: int, at: Nanoseconds, core: PartHost) -> list[Action]:
        return core.carry_out(core.rule.redraw(), at) if name == _REDRAW else []

    def draw(
        self,
        idle: Sequence[str],
        count: int,
        of_rule: RuleDraw,
        rng: np.random.Generator,
        version: int,
        *,
        replacement: bool,
    ) -> list[str]:
        """Arguments of `Server.draw`, and the version of the global model. Raises DeclarationError if
        the selection returns clients that it must not choose."""
        view = self.view
        view.at, view.version = to_seconds(self.now), version
        eligible = self._checked("eligible", self._selection.eligible(idle, view), idle)
        chosen: list[str] = []
        if eligible:
            view.draw += 1
            own = of_rule if len(eligible) == len(idle) else None
            draw = Draw(eligible, count, replacement, own)
            chosen = self._checked(
                "choose", self._selection.choose(draw, view, rng), eligible, count, repeats=replacement
            )
        for client in dict.fromkeys(chosen):
            view.clients[client].chosen += 1
            view.clients[client].last_draw = view.draw
        is_repeat = not chosen and self._none_since is not None
        if not (is_repeat and not eligible and not self._eligible):
            self._record(eligible, chosen, count)
        if not chosen and not is_repeat:
            self._none_since = self.now
            self._records.append(
                events.Note(
                    view.at,
                    f"the selection {self.name} chose none of {quantity(len(idle), 'idle client')}: the "
                    f"draw is repeated every {to_seconds(REDRAW_EVERY):g} s",
                )
            )
        elif chosen:
            self._none_since = None
        self._is_unfilled |= len(chosen) < min(count, len(idle))
        return chosen

    def note_round(self, client: str, *, loss: float, took: Nanoseconds, staleness: int) -> None:
        """A valid update. `loss`: as reported; ignored unless finite and at least 0. `took`: duration of
        the round."""
        seen, seconds = self.view.clients[client], to_seconds(took)
        seen.updates += 1
        seen.loss = loss if 0 <= loss < math.inf else None
        seen.duration = seconds
        before = seen.mean_duration or 0.0
        seen.mean_duration = before + (seconds - before) / seen.updates
        seen.staleness = staleness

    def note_battery(self, client: str, level: float, at: float) -> None:
        """`at`: device time in seconds. A level outside of 0 to 1, or of a device that does not train,
        is ignored."""
        if 0 <= level <= 1 and client in self.view.clients:
            seen = self.view.clients[client]
            seen.battery, seen.battery_at = level, at

    def note_join(self, client: str) -> None:
        """The battery level is unknown, because it may have been charged meanwhile."""
        self.view.clients[client].battery = None

    def pop_records(self) -> tuple[list[events.ClientsDrawn | events.Note], bool]:
        """Records since the last call, and whether a draw since then chose too few clients and must be
        repeated."""
        records, self._records = self._records, []
        is_unfilled, self._is_unfilled = self._is_unfilled, False
        return records, is_unfilled

    def _record(self, eligible: Sequence[str], chosen: Sequence[str], wanted: int) -> None:
        """Record a draw, with the changes of the eligible clients since the last record. All names in
        every record of a large fleet would take much space."""
        now = dict.fromkeys(eligible)
        before, self._eligible = self._eligible, now
        record = events.ClientsDrawn(
            at=self.view.at,
            draw=self.view.draw,
            wanted=wanted,
            eligible=len(eligible),
            chosen=" ".join(chosen),
            added=" ".join(client for client in now if client not in before),
            removed=" ".join(client for client in before if client not in now),
        )
        self._records.append(record)

    def _checked(
        self,
        method: str,
        returned: object,
        allowed: Sequence[str],
        count: int | None = None,
        *,
        repeats: bool = False,
    ) -> list[str]:
        """Clients that the selection's `method` returned. Raises DeclarationError if they are not a
        list, more than `count`, not all in `allowed`, or if one is there twice without `repeats`."""
        if returned is allowed and count is None:
            return [*allowed]
        what = f"{method} of the selection {self.name} returned"
        if not isinstance(returned, list | tuple):
            raise DeclarationError(f"{what} {returned!r:.{_SHOWN}}, expected a list of clients")
        known, found = frozenset(allowed), set[str]()
        for client in returned:
            if not isinstance(client, str) or client not in known:
                expected = "an idle client" if method == "eligible" else "an idle, eligible client"
                raise DeclarationError(f"{what} {client!r:.{_SHOWN}}, which is not {expected}")
            if client in found and not repeats:
                raise DeclarationError(f"{what} {client} twice")
            found.add(client)
        if count is not None and len(returned) > count:
            raise DeclarationError(f"{what} {len(returned)} clients, expected at most {count}")
        return [*returned]

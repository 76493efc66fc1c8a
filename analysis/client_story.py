"""History of one client, for troubleshooting; without I/O and clock."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from agents import events
from agents.texts import quantity


@dataclass(frozen=True, slots=True)
class Moment:
    at: float
    """Device time in seconds."""
    what: str

    def __str__(self) -> str:
        return f"{self.at:10.3f} s  {self.what}"


def story(records: Iterable[events.Record], client: str) -> list[Moment]:
    """From `events.jsonl`: the client's dispatches, updates, rejections and absences, and the events of
    its device and of the whole run."""
    moments = [moment for record in records for moment in _moments(record, client)]
    return sorted(moments, key=lambda moment: moment.at)


def _moments(record: events.Record, client: str) -> Iterator[Moment]:
    match record:
        case events.RunStarted(at, _, clients):
            yield Moment(at, f"the run clock starts {'with' if client in clients else 'without'} it")
        case events.UpdateApplied(client=one) if one == client:
            yield from _applied(record)
        case events.RoundUnfinished(at, one, version, dispatched, until, dispatch) if one == client:
            yield Moment(dispatched, f"sent version {version}, which leads to no applied update")
            if until < at:
                yield Moment(until, f"its answer to dispatch {dispatch} arrives")
            yield Moment(at, f"its dispatches up to {dispatch} lead to no applied update")
        case events.UpdateRejected(at, one, reason, dispatch) if one == client:
            what = f"update that answers dispatch {dispatch}" if dispatch else "message"
            yield Moment(at, f"{what} rejected: {reason}")
        case events.UpdateClipped(at, one, norm) if one == client:
            yield Moment(at, f"update of norm {norm:g} clipped")
        case events.ClientStatus(at, one, state) if one == client:
            yield Moment(at, f"status {state}")
        case events.Acted(at, one, source, _, details) if one == client:
            yield Moment(at, f"action of {source} on its device: {json.dumps(dict(details))}")
        case events.WrongSum(at, updates, answers) if client in (*updates, *answers):
            yield Moment(at, f"wrong sum discarded: {record.senders}")
        case events.Disrupted(at, since, reason):
            yield Moment(since, f"disruption until {at:.3f} s: {reason}")
        case events.Note(at, message) if client in message.replace(",", " ").split():
            yield Moment(at, message)
        case events.RunEnded(at, reason):
            yield Moment(at, f"the run ends: {events.end_reason(reason)}")


def _applied(update: events.UpdateApplied) -> Iterator[Moment]:
    number = f"dispatch {update.dispatch}"
    yield Moment(update.dispatched, f"sent version {update.base_version} as {number}")
    yield Moment(update.downloaded, f"received {number}")
    done = f"{quantity(update.steps, 'step')}, loss {update.loss:.4g}"
    yield Moment(update.train_start, f"trains until {update.train_end:.3f} s: {done}")
    yield Moment(update.sent, f"starts to upload update {update.sequence}, {update.bytes:,} bytes")
    yield Moment(update.arrived, f"update {update.sequence}, which answers {number}, arrived")
    yield Moment(
        update.applied,
        f"update {update.sequence} applied in version {update.applied_version}: staleness "
        f"{update.staleness}, weight {update.weight:.4g}",
    )

"""Inputs that the aggregator's core accepts in each phase of a run."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from agents import events
from agents.aggregator import inputs
from agents.aggregator.inputs import INPUTS, REACTIONS, IllegalInputError, Reaction, RunPhase
from agents.config import StopConditions
from agents.device_actions import Pause, to_json
from agents.energy.messages import RoundEnergy
from agents.timing.nanoseconds import SECOND
from agents.wire.messages import ReportRequest
from tests.agents.helpers import VANILLA, Core, make_core, message, records, started


def _in(phase: RunPhase) -> Core:
    """A core of a run in this phase, at 10 s."""
    if phase is RunPhase.WAITING:
        return make_core(VANILLA)[0]
    core, _ = started(stop=StopConditions(after=1e6))
    core.update("a", message("a", 1), 4, 1.0)
    if phase is RunPhase.SUSPENDED:
        core.handle(inputs.Suspended(10 * SECOND, "2"))
    if phase in (RunPhase.ENDED, RunPhase.FINISHED):
        core.due(1e6)
    if phase is RunPhase.FINISHED:
        core.evaluated(1, 0.5, 0.5, 1e6)
    assert core.core.phase is phase
    return core


def _input(kind: type[inputs.Input]) -> inputs.Input:
    """One of this kind that is of no consequence where it is handled."""
    some: dict[str, Any] = {
        "at": 10 * SECOND,
        "message": b"" if kind is inputs.Answered else message("a", 9),
        "arrived": 10 * SECOND,
        "client": "a",
        "sender": "a",
        "state": "ready",
        "line": events.to_line(events.Note(10.0, "so it is")),
        **dict.fromkeys(("leg", "reason", "part", "name"), "x"),
        **dict.fromkeys(("epoch", "since", "dispatch", "about", "version", "size", "samples"), 0),
        **dict.fromkeys(("wall_clock", "loss", "accuracy"), 0.5),
    }
    return kind(**{field.name: some[field.name] for field in fields(kind)})


def test_table_has_every_input_in_every_phase() -> None:
    assert {*REACTIONS} == {*INPUTS.values()}
    assert {len(row) for row in REACTIONS.values()} == {len(RunPhase)}
    assert [*RunPhase] == [*range(len(RunPhase))]


@pytest.mark.parametrize("phase", RunPhase)
@pytest.mark.parametrize("kind", INPUTS.values())
def test_ignored_inputs_do_nothing_and_illegal_ones_are_errors(
    kind: type[inputs.Input], phase: RunPhase
) -> None:
    core, event = _in(phase), _input(kind)
    match REACTIONS[kind][phase]:
        case Reaction.IGNORED:
            before = core.next_timer, core.ready
            assert core.core.handle(event) == []
            assert (core.next_timer, core.ready, core.core.phase) == (*before, phase)
        case Reaction.ILLEGAL:
            with pytest.raises(IllegalInputError, match=f"{kind.__name__} .*{phase}"):
                core.handle(event)
        case Reaction.HANDLED if kind in (inputs.PartEvaluated, inputs.EvaluationDone):
            pass  # one that was not requested is a mistake of ours in every phase
        case Reaction.HANDLED:
            core.handle(event)


@pytest.mark.parametrize("phase", [RunPhase.WAITING, RunPhase.SUSPENDED, RunPhase.ENDED])
def test_ready_client_is_asked_for_unacknowledged_updates(phase: RunPhase) -> None:
    core = _in(phase)
    ready = inputs.StatusChanged(10 * SECOND, "a", "ready")
    assert core.core.handle(ready) == [ReportRequest("a", 0)]
    assert core.core.handle(inputs.StatusChanged(10 * SECOND, "stranger", "ready")) == []


def test_client_that_is_ready_again_is_only_asked_for_a_report() -> None:
    done = _in(RunPhase.RUNNING).core.handle(inputs.StatusChanged(10 * SECOND, "b", "ready"))
    assert [action for action in done if isinstance(action, ReportRequest)] == [ReportRequest("b", 2)]
    assert ReportRequest("b", 0) not in done


@pytest.mark.parametrize(
    "record",
    [
        events.Acted(1.0, "a", "hand", 0.0, to_json(Pause())),
        RoundEnergy(1.0, "a", 1, 0.25, "sent", 0.5),
        events.Disrupted(1.0, 0.5, "the controller stood still"),
    ],
)
def test_order_that_comes_again_is_not_recorded_again(record: events.Record) -> None:
    core, written = _in(RunPhase.RUNNING), inputs.Written.from_record(record)
    assert records(core.handle(written)) == [record]
    for number in range(100):  # an order may come again after a hundred others
        note = inputs.Written.from_record(events.Note(1.0, f"note {number}"))
        assert len(records(core.handle(note))) == 1
    assert records(core.handle(written)) == []
    assert core.handle(inputs.Written('{"event":"of a later version"}')) == []


def test_inconsistent_state_is_reported() -> None:
    core = _in(RunPhase.RUNNING)
    core.core.server.clients["stranger"] = 0.5
    core.core._dispatches.send("c", 0, 0)
    with pytest.raises(AssertionError, match=r"stranger.* are present.*c is not present, and is to"):
        core.core.validate()

"""The aggregator's state machine: validity, presence, evaluation times."""

from __future__ import annotations

import dataclasses
import pickle
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from agents import events
from agents.aggregator import inputs
from agents.aggregator.actions import (
    BroadcastModel,
    Dispatch,
    Evaluate,
    Finish,
    Log,
    Save,
    StopClients,
)
from agents.aggregator.dispatches import Dispatched, Dispatches
from agents.config import StopConditions, UpdateBounds
from agents.rules import interface as rules
from agents.rules.area import Area
from agents.rules.async_fedavg import AsyncFedAvg
from agents.rules.asysg import AsySG
from agents.rules.defedavg_iid import DeFedAvgIid
from agents.rules.defedavg_niid import DeFedAvgNiid
from agents.rules.favano import Favano
from agents.rules.fedasync import FedAsync
from agents.rules.fedavg import FedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import RequestUpdate, Rule, Server, State, Update
from agents.timing.nanoseconds import from_seconds
from agents.wire.payloads import FAREWELL
from tests.agents.helpers import VANILLA, done, make_core, message, of, records, started

# Start


def test_run_starts_with_the_ready_clients() -> None:
    core, server = make_core(VANILLA, importance={"a": 0.2, "b": 0.3, "c": 0.5})
    assert core.status("c", "ready", 0.0) == []
    assert core.status("a", "ready", 0.0) == []
    assert core.status("stranger", "ready", 0.0) == []
    assert core.ready == ["a", "c"]  # device order
    assert core.start(wall_clock=1e9, epoch=100.0) == [
        Log(events.RunStarted(0.0, 1e9, ("a", "c"), ("b",))),
        Save(0),
        Evaluate(0),
        Dispatch("a", 0, 1),
        Dispatch("c", 0, 2),
    ]
    assert server.clients == {"a": 0.2, "c": 0.5}


def test_nothing_is_sent_before_the_start() -> None:
    core, _ = make_core(VANILLA)
    assert core.next_timer is None
    assert core.update("a", message("a", 1), 4, 0.0) == []
    assert core.reject("a", "garbage", 0.0) == []
    assert core.end("interrupted", 0.0) == []


# Updates


def test_an_update_is_applied_recorded_and_answered() -> None:
    core, server = started()
    core.update("b", message("b", 2), 4, at=1.0)
    actions = core.update("a", message("a", 1, 0.5), size=2600, at=1.5)
    assert server.w.tolist() == [1.5]
    assert actions == [
        Log(
            events.UpdateApplied(
                client="a",
                sequence=1,
                kind="delta",
                base_version=0,
                applied_version=2,
                staleness=1,
                weight=1.0,
                samples=10,
                steps=2,
                loss=0.5,
                bytes=2600,
                bytes_before=2600.0,
                dispatched=0.0,
                downloaded=0.125,
                train_start=0.25,
                train_end=0.375,
                sent=0.5,
                arrived=1.5,
                applied=1.5,
                dispatch=1,
            )
        ),
        Log(events.VersionMade(1.5, 2, 1)),
        Dispatch("a", 2, 4, acknowledged=1),
    ]


def test_rule_gets_all_fields_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update answers dispatch 1, sent at 0 s; b's second model is of version 1, sent at 1 s."""
    core, _ = started()
    core.update("b", message("b", 2), 4, at=1.0)
    told: list[Update] = []

    def listen(update: Update) -> Sequence[rules.Action]:
        told.append(update)
        return []

    monkeypatch.setattr(core.rule, "update", listen)
    fields = {"samples": 7, "steps": 3, "effective_steps": 2.5, **done(3.0)}
    sent = message("b", 3, 4.0, sequence=2, base_version=1, **fields)
    core.update("b", sent, 4, at=3.5, arrived=3.25)
    assert told == [
        Update(
            client="b",
            dispatch=3,
            base_version=1,
            vector=sent.vector,
            kind="delta",
            samples=7,
            steps=3,
            effective_steps=2.5,
            round_trip=2_250_000_000,
            dispatched=1_000_000_000,
        )
    ]


@pytest.mark.parametrize(
    ("sender", "stray", "reason"),
    [
        ("stranger", message("stranger", 1), "not present"),
        ("a", message("b", 1), "says it is from b"),
        ("a", message("a", 1, run="other"), "in run other"),
        ("a", message("a", 1, sequence=0), "duplicate: sequence 0"),
        ("a", message("a", 2), "answers dispatch 2, which is not open"),
        ("a", message("a", 10**400), "answers dispatch 1000"),
    ],
)
def test_stray_update_changes_nothing(sender: str, stray: Any, reason: str) -> None:
    core, server = started()
    (record,) = records(core.update(sender, stray, 4, 1.0))
    assert isinstance(record, events.UpdateRejected)
    assert record.dispatch == (stray.dispatch if stray.dispatch <= 2 else 0)
    assert reason in record.reason
    assert (server.w.tolist(), server.version) == ([0.0], 0)
    assert server.clients.keys() == {"a", "b"}
    assert of(Dispatch, core.update("a", message("a", 1), 4, 2.0))  # a's own is as welcome as before


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"vector": np.array([-np.inf], np.float32)}, "not finite"),
        ({"samples": 10**400}, "sequence, samples or steps are above 9223372036854775807"),
        ({"kind": "\x1b[2J\ud800\u202e" + "x" * 60_000}, r"kind \x1b[2J\ud800\u202exxx"),
        ({"schema": "s" * 60_000}, "another model: schema sss"),
        ({"downloaded": from_seconds(99.9)}, "times are not in order"),  # before it was sent
        ({"sent": 2**64}, "times are not in order"),
    ],
)
def test_unusable_update_is_dropped_and_its_client_gets_a_model(
    fields: dict[str, Any], reason: str
) -> None:
    core, server = started()
    log, unfinished, *then = core.update("a", message("a", 1, **fields), 4, 1.0)
    (record,) = records([log])
    assert isinstance(record, events.UpdateRejected)
    assert record.dispatch == 1
    assert reason in record.reason
    assert len(record.reason) <= 200
    assert unfinished == Log(events.RoundUnfinished(1.0, "a", 0, 0.0, 1.0, 1))
    assert then == [Dispatch("a", 0, 3)]
    assert (server.w.tolist(), server.version) == ([0.0], 0)
    assert list(server.clients) == ["a", "b"]


def test_times_of_another_clock_may_be_wrong_by_its_error() -> None:
    """The model was sent at 100 s, and the update arrived at 101 s. b has the aggregator's clock."""
    core, _ = started(clock_errors={"a": from_seconds(0.1)})
    late = {"downloaded": from_seconds(99.95), "sent": from_seconds(101.05)}
    (applied, *_) = records(core.update("a", message("a", 1, **late), 4, 1.0))
    assert isinstance(applied, events.UpdateApplied)
    assert (applied.dispatched, applied.downloaded) == (0.0, 0.0)
    assert (applied.sent, applied.arrived) == (1.0, 1.0)
    (rejected, *_) = records(core.update("b", message("b", 2, **late), 4, 1.0))
    assert isinstance(rejected, events.UpdateRejected)


def test_update_over_the_staleness_bound_is_not_clipped_and_its_client_gets_a_model() -> None:
    core, server = started(bounds=UpdateBounds(norm=2.5, staleness=0))
    core.update("a", message("a", 1, 0.5), 4, 1.0)
    rejected, _, again = core.update("b", message("b", 2, 3.0), 4, 1.0)
    (record,) = records([rejected])
    assert isinstance(record, events.UpdateRejected)
    assert record.reason == "staleness 1, expected at most 0"
    assert again == Dispatch("b", 1, 4)
    assert (server.w.tolist(), server.version) == ([0.5], 1)


@pytest.mark.parametrize(
    ("rule", "sent", "ended", "norm"),
    [
        (VANILLA, [30.0, -40.0], [3.0, -4.0], 50.0),  # Δ · 5/50
        (VANILLA, [3.0, 4.0], [3.0, 4.0], None),
        (FedAsync(mixing=1.0), [30.0, 40.0], [3.0, 4.0], 50.0),  # a model's distance from (0, 0)
        (AsySG(gradients=1), [0.0, 7.0], [0.0, -5.0], 7.0),
    ],
)
def test_an_update_over_the_norm_is_clipped_to_it(
    rule: Rule, sent: list[float], ended: list[float], norm: float | None
) -> None:
    vector = np.array(sent, np.float32)
    core, server = started(rule, w=np.zeros(2, np.float32), bounds=UpdateBounds(norm=5.0))
    done = core.update("a", message("a", 1, vector=vector, kind=rule.client_side.kind), 4, 1.0)
    assert server.w.tolist() == pytest.approx(ended, rel=1e-6)
    assert vector.tolist() == sent  # what arrived is somebody else's memory
    clipped = [r for r in records(done) if isinstance(r, events.UpdateClipped)]
    assert clipped == ([] if norm is None else [events.UpdateClipped(1.0, "a", norm)])


def test_round_continues_without_a_diverged_update() -> None:
    core, server = started(FedAvg())
    core.update("b", message("b", 2, 3.0), 4, 1.0)
    core.update("a", message("a", 1, float("nan")), 4, 1.5)
    assert (server.w.tolist(), server.version) == ([3.0], 1)
    assert core.end_of_instant(1.5) == [Dispatch("a", 1, 3), Dispatch("b", 1, 4, acknowledged=1)]


def test_diverged_client_is_in_the_next_round() -> None:
    core, server = started(FedAvg())
    core.update("a", message("a", 1, float("nan")), 4, 1.0)
    assert (core.end_of_instant(1.0), server.version) == ([], 0)
    core.update("b", message("b", 2, 3.0), 4, 1.5)
    assert core.end_of_instant(1.5) == [Dispatch("a", 1, 3), Dispatch("b", 1, 4, acknowledged=1)]


def test_diverged_client_gets_the_model_of_a_round_that_begins_at_the_same_instant() -> None:
    core, _ = started(FedAvg(round_timeout=5.0))
    core.due(5.0)
    rejected, unfinished = records(core.update("a", message("a", 1, float("nan")), 4, 5.0))
    assert isinstance(rejected, events.UpdateRejected)
    assert unfinished == events.RoundUnfinished(5.0, "a", 0, 0.0, 5.0, 1)
    assert core.end_of_instant(5.0) == [Dispatch("a", 0, 3), Dispatch("b", 0, 4)]
    answer = message("a", 3, sequence=2, **done(6.0))
    assert records(core.update("a", answer, 4, 6.0)) == []  # the round takes it


def test_diverged_client_continues_with_the_newer_model_it_has() -> None:
    core, _ = started(FedAvg(round_timeout=5.0))
    core.due(5.0)
    assert core.end_of_instant(5.0) == [Dispatch("a", 0, 3), Dispatch("b", 0, 4)]
    rejected, unfinished = records(core.update("a", message("a", 1, float("nan")), 4, 6.0))
    assert isinstance(rejected, events.UpdateRejected)
    assert unfinished == events.RoundUnfinished(6.0, "a", 0, 0.0, 6.0, 1)
    assert core.end_of_instant(6.0) == []
    assert core.update("a", message("a", 3, sequence=2, **done(6.0)), 4, 7.0) == []  # the round takes it


def test_a_duplicate_is_dropped() -> None:
    core, server = started()
    core.update("a", message("a", 1), 4, 1.0)
    assert core.update("a", message("a", 1), 4, 1.1) == []
    assert core.acknowledged == [("a", 1)] * 2  # the first may be lost
    assert server.w.tolist() == [1.0]


def test_vector_of_a_waiting_update_is_not_kept() -> None:
    core, _ = started(FedBuff(buffer_size=2))
    first = message("a", 1)
    vector = weakref.ref(first.vector)
    core.update("a", first, 4, 1.0)
    del first
    assert vector() is None
    (record, _) = records(core.update("b", message("b", 2), 4, 2.0))[:2]
    assert (record.client, record.arrived, record.applied) == ("a", 1.0, 2.0)  # type: ignore[union-attr]


def test_only_the_current_round_has_a_timer() -> None:
    core, _ = started(FedAvg(round_timeout=5.0))
    core.update("a", message("a", 1), 4, 1.0)
    core.update("b", message("b", 2), 4, 1.0)
    assert core.next_timer == 6.0


def test_update_ignored_by_the_rule_is_recorded() -> None:
    core, server = started(FedAvg(round_timeout=5.0))
    core.update("b", message("b", 2, 3.0), 4, 1.0)
    core.due(5.0)
    assert server.w.tolist() == [3.0]
    assert records(core.update("a", message("a", 1, 9.0), 4, 6.0)) == [
        events.UpdateRejected(6.0, "a", "late: its round is over", 1),
        events.RoundUnfinished(6.0, "a", 0, 0.0, 6.0, 1),
    ]
    assert len(core.core.arrivals) == 0  # nothing of it is kept
    assert server.w.tolist() == [3.0]


def test_only_the_first_of_many_stray_messages_are_recorded() -> None:
    core, _ = started()
    garbage = Log(events.UpdateRejected(1.0, "a", "shorter than a header"))
    told = [core.reject("a", "shorter than a header", 1.0) for _ in range(1000)]
    assert told == [[garbage]] * 100 + [[]] * 900
    assert len(core.reject("b", "shorter than a header", 1.0)) == 1  # another's are its own
    assert len(core.reject("a", "shorter than a header", 1.1)) == 1  # ten a second
    assert core.update("a", message("a", 9), 4, 1.15) == []  # a stray is one of them
    assert of(Dispatch, core.update("a", message("a", 1), 4, 1.15))  # what answers a dispatch is not
    core.end("interrupted", 2.0)
    notes = [each for each in records(core.evaluated(1, 0.5, 0.5, 2.0)) if isinstance(each, events.Note)]
    assert notes == [events.Note(2.0, "901 more messages of a were rejected")]


# Who is present


def test_client_joins_during_the_run() -> None:
    core, server = make_core(VANILLA)
    core.status("b", "ready", 0.0)
    core.start(1e9, 100.0)
    status = Log(events.ClientStatus(2.0, "a", "ready"))
    assert core.status("a", "ready", 2.0) == [status, Dispatch("a", 0, 2)]
    assert list(server.clients) == ["a", "b"]


def test_departed_client_can_answer_only_the_dispatch_of_its_return() -> None:
    core, server = started()
    assert records(core.status("a", "offline", 1.0)) == [
        events.ClientStatus(1.0, "a", "offline"),
        events.RoundUnfinished(1.0, "a", 0, 0.0, 1.0, 1),
    ]
    assert list(server.clients) == ["b"]
    (record,) = records(core.update("a", message("a", 1), 4, 1.1))
    assert isinstance(record, events.UpdateRejected)
    assert of(Dispatch, core.status("a", "ready", 2.0)) == [Dispatch("a", 0, 3)]
    core.update("a", message("a", 1), 4, 2.1)
    assert server.w.tolist() == [0.0]
    core.update("a", message("a", 3, sequence=2, **done(2.1)), 4, 2.2)
    assert server.w.tolist() == [1.0]


def test_absent_client_joins_only_with_status_ready() -> None:
    core, server = started()
    core.status("a", "offline", 1.0)
    for state in ("training", "joining"):
        assert of(Dispatch, core.status("a", state, 2.0)) == []
    assert list(server.clients) == ["b"]


def test_restarted_client_may_repeat_a_sequence_number() -> None:
    core, server = started(FedBuff(buffer_size=2))
    core.update("a", message("a", 1, 2.0), 4, 1.0)
    core.status("a", "joining", 2.0)
    assert of(Dispatch, core.status("a", "ready", 3.0)) == [Dispatch("a", 0, 4, acknowledged=1)]
    first, second, _ = records(core.update("a", message("a", 4, 4.0, **done(3.0)), 4, 4.0))
    assert isinstance(first, events.UpdateApplied)
    assert isinstance(second, events.UpdateApplied)
    assert (first.sequence, first.arrived) == (1, 1.0)
    assert (second.sequence, second.arrived) == (1, 4.0)
    assert server.w.tolist() == [3.0]


def test_status_of_a_present_client_keeps_its_open_dispatches() -> None:
    core, server = started(DeFedAvgIid(buffer_size=1))
    assert core.status("a", "training", 0.5)[0] == Log(events.ClientStatus(0.5, "a", "training"))
    core.update("a", message("a", 1), 4, 1.0)  # the broadcast
    assert server.version == 1


def test_restarted_client_cannot_answer_an_older_broadcast() -> None:
    core, server = started(DeFedAvgIid(buffer_size=1))
    core.status("a", "joining", 0.5)
    core.status("a", "ready", 0.5)
    (record,) = records(core.update("a", message("a", 1), 4, 1.0))
    assert isinstance(record, events.UpdateRejected)
    assert record.reason == "answers dispatch 1, which is not open"
    assert server.version == 0


# Timers


def test_versions_are_evaluated_once_at_a_steady_pace() -> None:
    core, _ = started(evaluate_every=2.0)
    assert core.next_timer == 2.0
    assert core.due(1.9) == []
    assert core.due(2.0) == []  # still version 0
    core.update("a", message("a", 1), 4, 3.0)
    assert core.due(4.1) == [Evaluate(1)]
    assert core.next_timer == 6.0  # of the plan, not of the delay
    core.update("b", message("b", 2), 4, 5.0)
    assert core.due(6.0) == []  # the evaluation of version 1 still goes on
    assert records(core.evaluated(1, 0.5, 0.8, 6.5)) == [events.Evaluated(4.1, 1, 0.5, 0.8)]
    assert core.due(13.0) == [Evaluate(2)]  # those missed are not made up for
    assert core.next_timer == 14.0


def test_without_checkpoints_the_evaluation_is_the_only_timer() -> None:
    core, _ = started(stop=StopConditions(updates=1), evaluate_every=2.0, checkpoint_every=None)
    assert core.next_timer == 2.0
    assert of(Save, core.due(1e6)) == []


def test_checkpoint_of_the_last_instant_is_saved_before_the_end() -> None:
    core, _ = started(stop=StopConditions(after=2e6))
    assert core.due(1e6) == [Save(0)]
    saved, stop, *_ = core.due(2e6)
    assert (saved, stop) == (Save(0), StopClients())


# All together


def test_farewell_is_passed_to_the_rule_if_it_matches_the_last_applied_update() -> None:
    aggregator, server = started(Area(criterion="every", every=1))
    told = message("a", 1, kind="model", value=4.0)
    aggregator.update("a", told, 10, 1.0)
    farewell = message("a", 0, kind=FAREWELL, value=4.0, sequence=1)
    assert aggregator.update("a", dataclasses.replace(farewell, sequence=2), 10, 2.0) == []
    assert aggregator.update("b", farewell, 10, 2.0) == []
    (note,) = records(aggregator.update("a", farewell, 10, 2.0))
    assert isinstance(note, events.Note)
    assert note.message.startswith("a retired")
    assert aggregator.update("a", farewell, 10, 2.0) == []  # twice
    assert server.w.shape == (1,)


@pytest.mark.parametrize("vector", [[4.0, 4.0], [np.nan]])
def test_a_farewell_without_a_model_is_rejected(vector: list[float]) -> None:
    aggregator, _ = started(Area(criterion="every", every=1))
    aggregator.update("a", message("a", 1, kind="model", value=4.0), 10, 1.0)
    wrong = message("a", 0, kind=FAREWELL, sequence=1, vector=np.array(vector, np.float32))
    (rejected,) = records(aggregator.update("a", wrong, 10, 2.0))
    assert isinstance(rejected, events.UpdateRejected)


def test_rule_gets_no_memory_if_no_update_was_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    aggregator, _ = started(Area(criterion="every", every=1))
    told: list[tuple[str, Any]] = []
    retire = aggregator.rule.retire

    def listen(client: str, memory: Any) -> Sequence[rules.Action]:
        told.append((client, memory))
        return retire(client, memory)

    monkeypatch.setattr(aggregator.rule, "retire", listen)
    farewell = message("a", 0, kind=FAREWELL, sequence=0, vector=np.zeros(0, np.float32))
    (note,) = records(aggregator.update("a", farewell, 10, 2.0))
    assert isinstance(note, events.Note)
    assert note.message.startswith("a retired")
    assert told == [("a", None)]


def test_client_returning_after_a_farewell_is_new() -> None:
    aggregator, _ = started(Area(criterion="every", every=9))
    aggregator.update("a", message("a", 1, kind="model", value=4.0), 10, 1.0)
    farewell = message("a", 0, kind=FAREWELL, value=4.0, sequence=1)
    aggregator.update("a", farewell, 10, 2.0)
    for state in ("offline", "joining"):
        aggregator.status("a", state, 2.0)
    (dispatch,) = of(Dispatch, aggregator.status("a", "ready", 3.0))
    assert dispatch.acknowledged == 0


# Late, early, and in which order


def test_a_late_timeout_counts_from_when_it_was_due() -> None:
    core, _ = started(FedAvg(round_timeout=5.0))
    core.due(5.4)
    assert core.next_timer == 10.0


def test_models_are_sent_before_the_requests_of_the_instant() -> None:
    core, server = started(DeFedAvgNiid(sample=2, send_buffer="hold"))
    for client in {request.client for request in of(RequestUpdate, core.end_of_instant(1.0))}:
        core.update(client, message(client, 1, 2.0), 4, 1.0)
    for client in ("a", "b"):  # whoever was drawn
        core.update(client, message(client, 1, 2.0), 4, 1.0)
    assert server.version >= 1
    broadcast, *requests = core.end_of_instant(1.0)
    assert isinstance(broadcast, BroadcastModel)
    assert requests
    assert all(isinstance(request, RequestUpdate) for request in requests)


def test_request_to_a_client_that_left_in_the_instant_is_not_sent() -> None:
    core, _ = started(Favano(period=2.0, sample=2))
    core.due(2.0)
    core.status("a", "offline", 2.0)
    assert core.end_of_instant(2.0) == [RequestUpdate("b", "interrupt")]


def test_request_is_not_sent_to_a_client_that_has_answered() -> None:
    core, _ = started(Favano(period=2.0, sample=2))
    core.due(2.0)
    core.update("a", message("a", 1, kind="model"), 4, 2.0)
    assert core.end_of_instant(2.0) == [RequestUpdate("b", "interrupt")]


def test_request_answered_by_an_unusable_update_is_repeated() -> None:
    core, _ = started(Favano(period=2.0, sample=2))
    core.due(2.0)
    core.end_of_instant(2.0)
    core.update("a", message("a", 7, kind="model"), 4, 2.5)
    assert core.end_of_instant(2.5) == [RequestUpdate("a", "interrupt")]
    core.update("a", message("a", 7, kind="model", sequence=0), 4, 2.5)  # an old one tells nothing
    assert core.end_of_instant(2.5) == []


@dataclasses.dataclass(frozen=True)
class Doubling(Rule):
    """Client a has two models at hand, and is asked for an update."""

    paper: ClassVar[str] = "nobody's"
    equation: ClassVar[str] = "w ← w"

    def begin(self, server: Server) -> State:
        return DoublingState()


class DoublingState(State):
    def start(self) -> Sequence[rules.Action]:
        return [rules.Send("a"), rules.Send("a"), rules.RequestUpdate("a", "pull")]

    def update(self, update: Update) -> Sequence[rules.Action]:
        return []

    def join(self, client: str) -> Sequence[rules.Action]:
        return []


def test_diverged_client_with_a_newer_model_is_requested_again() -> None:
    core, _ = started(Doubling())
    core.update("a", message("a", 1, float("nan")), 4, 1.0)
    assert core.end_of_instant(1.0) == [RequestUpdate("a", "pull")]


def test_superseded_broadcast_can_no_longer_be_answered() -> None:
    dispatches = Dispatches()
    first, second = dispatches.broadcast(0, 0, "ab"), dispatches.broadcast(1, 5, "ab")
    assert dispatches.find("a", second) == Dispatched(1, 5)
    dispatches.close("a", second)
    assert dispatches.find("a", first) is None
    assert dispatches.find("a", second) is None
    assert dispatches.find("b", first) == Dispatched(0, 0)
    dispatches.restart("b")
    assert dispatches.find("b", second) is None


def test_models_of_open_dispatches_are_kept() -> None:
    """The slow client's dispatch and the fast one's newest are open, and none between."""
    dispatches = Dispatches()
    dispatches.send("slow", 0, 0)
    for version in range(1, 100):
        dispatches.close("fast", dispatches.send("fast", version, version))
    dispatches.send("fast", 100, 100)
    assert dispatches.open_versions(["slow", "fast"]) == {0, 100}
    assert dispatches.open_versions(["fast"]) == {100}
    number = dispatches.broadcast(101, 101, ["slow", "fast"])
    dispatches.broadcast(102, 102, ["slow", "fast"])
    dispatches.close("fast", number)
    assert dispatches.open_versions(["fast"]) == {102}
    assert dispatches.open_versions(["slow", "fast"]) == {0, 101, 102}


def test_few_base_models_are_kept_for_differences() -> None:
    core, _ = started(FedAsync(), keeps_models=True)
    for number in range(3, 40):
        sent = {"sequence": number, "base_version": max(0, number - 3), **done(0.0)}
        core.update("b", message("b", number - 1, kind="model", **sent), 4, 1.0)
    assert len(core.core._sending.bases) == 2


def test_impossible_time_is_rejected_while_the_clock_is_suspended() -> None:
    core, _ = started(VANILLA)
    core.handle(inputs.Suspended(from_seconds(1.0), "2"))
    times = dict.fromkeys(("downloaded", "train_start", "train_end", "sent"), 10**400)
    (rejected, *_) = records(core.update("a", message("a", 1, **times), 4, 1.0))
    assert isinstance(rejected, events.UpdateRejected)


def test_only_open_broadcasts_are_kept_in_memory() -> None:
    dispatches = Dispatches()
    first = dispatches.broadcast(0, 0, "ab")
    numbers = [dispatches.broadcast(version, version, "ab") for version in range(1, 100)]
    dispatches.close("a", numbers[-1])
    dispatches.broadcast(100, 100, "ab")
    assert dispatches.find("b", first) == Dispatched(0, 0)  # it is slow, and may answer that one still
    dispatches.close("b", numbers[-2])
    dispatches.broadcast(101, 101, "ab")
    assert dispatches.first_open("b") == Dispatched(99, 99)
    assert len(pickle.dumps(dispatches)) < 300


def test_a_round_trip_ends_with_the_arrival() -> None:
    """Arrived at 1.5 s, handled at 1.75 s: τ = 1.5 and 3, so d_b = (1/1.5 + 1/3)·3·½ = 1.5."""
    core, _ = started(AsyncFedAvg(weights="time_based"))
    core.update("a", message("a", 1), 4, at=1.75, arrived=1.5)
    (update, _) = records(core.update("b", message("b", 2), 4, at=4.0, arrived=3.0))
    assert isinstance(update, events.UpdateApplied)
    assert update.weight == pytest.approx(1.5)


def test_nothing_is_recorded_after_the_end_if_one_update_makes_two_versions() -> None:
    """b's second update completes a second round at once; the first one already ended the run."""
    core, _ = started(DeFedAvgIid(buffer_size=2), StopConditions(updates=2))
    core.end_of_instant(0.0)
    core.update("b", message("b", 1), 4, 1.0)
    actions = list(core.update("a", message("a", 1), 4, 1.0))
    actions += core.evaluated(1, 0.5, 0.5, 1.0)
    assert isinstance(actions[-1], Finish)
    assert core.status("a", "offline", 2.0) == []
    assert core.due(9.0) == core.end_of_instant(9.0) == core.end("interrupted", 9.0) == []


def test_evaluation_that_was_not_requested_is_an_internal_error() -> None:
    core, _ = started()
    with pytest.raises(RuntimeError, match="not requested"):
        core.evaluated(0, 0.5, 0.5, 1.0)


def test_memory_unknown_to_the_rule_is_not_acknowledged() -> None:
    core, _ = started(Area(criterion="every", every=9))
    core.update("a", message("a", 1, kind="model"), 4, 1.0)
    again = message("a", 3, kind="model", sequence=2, **done(2.0))  # it has lost its memory
    (dispatch,) = of(Dispatch, core.update("a", again, 4, 2.0))
    assert dispatch.acknowledged == 0


def test_ignored_update_is_acknowledged_if_clients_have_no_memory() -> None:
    core, _ = started(DeFedAvgNiid(sample=1))
    state: Any = core.rule
    (asked,) = state._waiting
    (unasked,) = {"a", "b"} - {asked}
    actions = core.update(unasked, message(unasked, 1, **done(1.0)), 4, 1.0)
    assert of(Dispatch, actions) == [Dispatch(unasked, 0, 2, acknowledged=1)]

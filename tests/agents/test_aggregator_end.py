"""The aggregator's state machine: when a run ends, and that nothing moves after it."""

from __future__ import annotations

from typing import Any

import pytest

from agents import events
from agents.aggregator import inputs
from agents.aggregator.actions import Actions, Dispatch, Evaluate, Finish, Log, Save, StopClients
from agents.aggregator.inputs import LastEvaluation
from agents.config import StopConditions
from agents.rules.asysg import AsySG
from agents.rules.defedavg_iid import DeFedAvgIid
from agents.rules.favano import Favano
from agents.rules.fedasync import FedAsync
from agents.rules.fedavg import FedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Rule
from agents.timing.nanoseconds import from_seconds
from tests.agents.helpers import Core, done, make_core, message, of, records, started


def _end_after(core: Core, version: int, actions: Actions) -> Actions:
    """The final evaluation that `actions` ask for is done."""
    assert actions[-1] == Evaluate(version)
    return core.evaluated(version, 0.5, 0.8, 11.0)


def test_resumed_run_continues_its_counters() -> None:
    core, _ = started(stop=StopConditions(after=10.0, updates=2), evaluate_every=2.0)
    core.update("a", message("a", 1), 4, 5.0)
    core.due(5.5)
    core.evaluated(1, 0.5, 0.8, 5.6)
    core.handle(inputs.Suspended(from_seconds(6.0), "2"))
    core.status("a", "ready", 6.0)
    again = core.start(1e9, 100.0, at=6.0)
    assert records(again) == [
        events.RunStarted(6.0, 1e9, ("a",), ("b",)),
        events.RoundUnfinished(6.0, "a", 1, 5.0, 6.0, 3),
        events.RoundUnfinished(6.0, "b", 0, 0.0, 6.0, 2),
    ]
    assert core.end_of_instant(6.0) == [Dispatch("a", 1, 4, acknowledged=1)]
    assert core.next_timer == 6.0
    actions = core.update("a", message("a", 4, base_version=1, **done(6.5)), 4, 7.0)
    assert events.VersionMade(7.0, 2, 1) in records(actions)
    assert StopClients() in actions  # the second update


def test_run_stops_after_a_time() -> None:
    core, _ = started(stop=StopConditions(after=10.0))
    core.update("a", message("a", 1), 4, 1.0)
    assert core.due(9.9) == []
    actions = core.due(10.0)
    assert actions == [StopClients(), Evaluate(1)]
    assert _end_after(core, 1, actions) == [
        Log(events.Evaluated(10.0, 1, 0.5, 0.8)),
        Log(events.RoundUnfinished(10.0, "a", 1, 1.0, 10.0, 3)),
        Log(events.RoundUnfinished(10.0, "b", 0, 0.0, 10.0, 2)),
        Save(1, final=True),
        Log(events.RunEnded(10.0, "after", 1, 1)),
        Finish("after"),
    ]
    assert core.next_timer is None


def test_run_without_updates_needs_no_second_evaluation() -> None:
    core, _ = started(stop=StopConditions(after=10.0))
    assert core.due(10.0)[-1] == Finish("after")


def test_run_stops_after_a_number_of_updates() -> None:
    core, _ = started(FedBuff(buffer_size=2), StopConditions(updates=2))
    core.update("a", message("a", 1), 4, 1.0)
    actions = core.update("b", message("b", 2), 4, 2.0)
    assert actions[-2:] == [StopClients(), Evaluate(1)]
    assert of(Dispatch, actions) == []
    assert _end_after(core, 1, actions)[-1] == Finish("updates")


def test_run_stops_at_the_target_accuracy() -> None:
    core, _ = started(stop=StopConditions(target_accuracy=0.8), evaluate_every=2.0)
    core.update("a", message("a", 1), 4, 1.0)
    core.due(2.0)
    assert core.evaluated(1, 0.5, 0.79, 2.1)[-1] != Finish("target_accuracy")
    core.update("b", message("b", 2), 4, 3.0)
    core.due(4.0)
    assert [type(action) for action in core.evaluated(2, 0.5, 0.8, 4.1)] == [
        Log,
        StopClients,
        Log,  # of the rounds of a and b, which are not finished
        Log,
        Save,
        Log,
        Finish,
    ]


def _unfinished(actions: Actions) -> list[events.Record]:
    return [one for one in records(actions) if isinstance(one, events.RoundUnfinished)]


def test_update_in_no_version_is_recorded_at_the_end() -> None:
    core, _ = started(FedBuff(buffer_size=3), stop=StopConditions(after=10.0))
    core.update("a", message("a", 1), 4, 1.0)
    core.end_of_instant(1.0)  # it is sent another model
    assert _unfinished(core.due(10.0)) == [
        events.RoundUnfinished(10.0, "a", 0, 0.0, 1.0, 1),
        events.RoundUnfinished(10.0, "a", 0, 1.0, 10.0, 3),
        events.RoundUnfinished(10.0, "b", 0, 0.0, 10.0, 2),
    ]


def test_client_without_a_dispatch_has_no_unfinished_round() -> None:
    core, _ = started(FedAvg(), stop=StopConditions(after=10.0))
    core.update("a", message("a", 1), 4, 1.0)  # it waits for b
    left = core.status("b", "offline", 9.0)
    assert _unfinished(left) == [events.RoundUnfinished(9.0, "b", 0, 0.0, 9.0, 2)]
    core.end_of_instant(9.0)
    ended = _end_after(core, 1, core.due(10.0))
    assert _unfinished(ended) == [events.RoundUnfinished(10.0, "a", 1, 9.0, 10.0, 3)]


def test_unanswered_broadcast_is_an_unfinished_round() -> None:
    core, _ = started(DeFedAvgIid(buffer_size=1), stop=StopConditions(after=10.0))
    core.end_of_instant(0.0)
    core.update("a", message("a", 1), 4, 1.0)
    core.end_of_instant(1.0)
    ended = _end_after(core, 1, core.due(10.0))
    assert _unfinished(ended) == [
        events.RoundUnfinished(10.0, "a", 1, 1.0, 10.0, 2),
        events.RoundUnfinished(10.0, "b", 0, 0.0, 10.0, 2),
    ]


def test_running_evaluation_is_awaited_before_the_final_one() -> None:
    core, _ = started(stop=StopConditions(after=10.0), evaluate_every=9.0)
    core.update("a", message("a", 1), 4, 1.0)
    core.due(9.0)
    core.update("b", message("b", 2), 4, 9.5)
    assert core.due(10.0) == [StopClients()]
    actions = core.evaluated(1, 0.5, 0.7, 10.5)
    assert actions == [Log(events.Evaluated(9.0, 1, 0.5, 0.7)), Evaluate(2)]
    assert _end_after(core, 2, actions)[-1] == Finish("after")


def test_a_run_ends_at_request() -> None:
    core, _ = started()
    core.update("a", message("a", 1), 4, 1.0)
    actions = core.end("interrupted", 10.0)
    assert actions == [StopClients(), Evaluate(1)]
    assert core.end("interrupted", 10.5) == []  # one end is enough
    assert _end_after(core, 1, actions)[-2:] == [
        Log(events.RunEnded(10.0, "interrupted", 1, 1)),
        Finish("interrupted"),
    ]


def test_run_ends_when_no_clients_are_left() -> None:
    core, _ = started()
    core.status("a", "offline", 1.0)
    actions = core.status("b", "offline", 2.0)
    assert actions[-1] == Finish("no clients left")
    assert events.RunEnded(2.0, "no clients left", 0, 0) in records(actions)


DIVERGED, USABLE = float("nan"), 1.0


@pytest.mark.parametrize(
    ("after", "rounds", "ended"),
    [
        (None, [(DIVERGED, DIVERGED)] * 9, None),
        (None, [(DIVERGED, DIVERGED)] * 10, 20.0),
        (None, [*[(DIVERGED, DIVERGED)] * 9, (DIVERGED, USABLE), *[(DIVERGED, DIVERGED)] * 9], None),
        (None, [(DIVERGED, USABLE)] * 30, None),
        (1e6, [(DIVERGED, DIVERGED)] * 30, None),
    ],
)
def test_run_that_would_never_end_ends_when_all_training_diverged(
    after: float | None, rounds: list[tuple[float, float]], ended: float | None
) -> None:
    """Each round has the updates of a and b. The tenth refusal in a row of both ends the run."""
    core, server = started(stop=StopConditions(after=after, updates=100))
    dispatches, at = {"a": 1, "b": 2}, 0.0
    for client, value in (
        (client, value) for each in rounds for client, value in zip("ab", each, strict=True)
    ):
        at += 1.0
        fields = {"base_version": server.version, **done(at)}
        actions = core.update(client, message(client, dispatches[client], value, **fields), 4, at)
        if core.ended is None:
            sent = of(Dispatch, [*actions, *core.end_of_instant(at)])
            dispatches |= {one.client: one.number for one in sent}
    assert core.ended == ended
    if ended is not None:
        assert events.RunEnded(ended, "diverged", 0, 0) in records(actions)


def test_run_ends_when_the_only_client_at_work_diverged() -> None:
    """b waits for the aggregation of its gradient, which needs one of a."""
    core, _ = started(AsySG(gradients=2), stop=StopConditions(updates=100))
    core.update("b", message("b", 2, kind="gradient", **done(1.0)), 4, 1.0)
    number = 1
    for at in range(2, 12):
        assert core.ended is None
        fields = {"kind": "gradient", **done(at)}
        actions = core.update("a", message("a", number, DIVERGED, **fields), 4, at)
        number = 2 + at - 1
    assert core.ended == 11.0
    assert events.RunEnded(11.0, "diverged", 0, 0) in records(actions)


def test_run_may_wait_for_absent_clients() -> None:
    core, server = started(patient=True)
    core.status("a", "offline", 1.0)
    core.status("b", "offline", 2.0)
    assert server.clients == {}
    core.status("b", "ready", 3.0)
    assert list(server.clients) == ["b"]


def test_inputs_after_the_end_change_nothing() -> None:
    core, server = started(FedAsync(), StopConditions(after=4.0, updates=100))
    core.update("a", message("a", 1, kind="model"), 4, 1.0)
    core.due(4.0)
    w, version = server.w.copy(), server.version
    told = Log(events.UpdateRejected(4.0, "b", "arrived after the run had ended", 2))
    assert core.update("b", message("b", 2, kind="model"), 4, 4.1) == [told]
    assert core.reject("b", "garbage", 4.1) == []
    assert core.status("a", "offline", 4.2) == []
    assert core.status("b", "offline", 4.2) == []
    assert core.end("interrupted", 4.3) == []
    assert core.next_timer is None
    assert core.end_of_instant(4.3) == []
    assert (server.w.tolist(), server.version) == (w.tolist(), version)


@pytest.mark.parametrize(
    ("rule", "dispatches"),
    [
        (FedAvg(), (1, 2)),  # models
        (DeFedAvgIid(buffer_size=2), (1, 1)),  # a broadcast
        (Favano(period=1.0, sample=2), ()),  # requests
    ],
)
def test_messages_deferred_to_the_end_of_the_last_instant_are_not_sent(
    rule: Rule, dispatches: tuple[int, ...]
) -> None:
    """The evaluation of the first model is still running."""

    def waiting() -> Core:
        core, _ = make_core(rule)
        for client in ("a", "b"):
            core.status(client, "ready", 0.0)
        core.start(epoch=100.0)
        core.end_of_instant(0.0)
        for client, dispatch in zip("ab", dispatches, strict=False):
            core.update(client, message(client, dispatch), 4, 1.0)
        core.due(1.0)
        return core

    assert waiting().end_of_instant(1.0)
    ended = waiting()
    assert ended.end("interrupted", 1.0) == [StopClients()]
    assert ended.end_of_instant(1.0) == []


def _ended(timeout: float | None = 30.0, dilation: float = 1.0, **settings: Any) -> Core:
    """A run that has ended after 10 s, and waits for the evaluation of version 1."""
    waits = LastEvaluation(timeout=timeout, dilation=dilation)
    core, _ = started(stop=StopConditions(after=10.0), last_evaluation=waits, **settings)
    core.update("a", message("a", 1), 4, 1.0)
    assert core.due(10.0) == [StopClients(), Evaluate(1)]
    return core


def _books(version: int, *notes: str) -> Actions:
    """Final actions of a run that ended normally after 10 s."""
    return [
        *(Log(events.Note(10.0, note)) for note in notes),
        Log(events.RoundUnfinished(10.0, "a", version, 1.0, 10.0, 3)),
        Log(events.RoundUnfinished(10.0, "b", 0, 0.0, 10.0, 2)),
        Save(version, final=True),
        Log(events.RunEnded(10.0, "after", version, 1)),
        Finish("after"),
    ]


def test_last_evaluation_is_abandoned_after_its_timeout() -> None:
    core = _ended()
    assert core.next_timer == 11.5
    told = core.due(11.5)
    assert told == [
        Log(
            events.Note(
                10.0,
                "the run is over and waits for its last evaluation, at most 30 s (without limit: "
                "evaluate: {when: after})",
            )
        )
    ]
    assert core.next_timer == 40.0
    assert core.due(39.9) == []
    gives_up = "the last model was not evaluated: the run waits no longer"
    assert core.due(40.0) == _books(1, gives_up)
    assert core.next_timer is None
    assert core.evaluated(1, 0.5, 0.8, 40.1) == []


def test_host_that_slept_past_both_deadlines_records_both_notes() -> None:
    notes = [type(action) for action in _ended().due(100.0)]
    assert notes == [*[Log] * 4, Save, Log, Finish]


def test_last_evaluation_timeout_is_in_host_time() -> None:
    core = _ended(dilation=4.0)
    assert core.next_timer == 10.375
    core.due(10.375)
    assert core.next_timer == 17.5


@pytest.mark.parametrize("at", [10.5, 20.0])
def test_interrupt_during_the_last_evaluation_ends_at_once(at: float) -> None:
    core = _ended()
    core.due(at)
    assert core.end("interrupted", at) == _books(
        1, "the last model was not evaluated: the run was interrupted"
    )


def test_interrupted_run_waits_briefly_for_its_last_evaluation() -> None:
    core, _ = started(last_evaluation=LastEvaluation())
    core.update("a", message("a", 1), 4, 1.0)
    assert core.end("interrupted", 10.0) == [StopClients(), Evaluate(1)]
    assert core.next_timer == 11.5
    assert [type(action) for action in core.due(11.5)] == [Log, Log, Log, Save, Log, Finish]


@pytest.mark.parametrize("first_is_done", [True, False])
def test_timeout_covers_the_running_and_the_last_evaluation_together(first_is_done: bool) -> None:
    core, _ = started(
        stop=StopConditions(after=10.0), evaluate_every=9.0, last_evaluation=LastEvaluation(timeout=5.0)
    )
    core.update("a", message("a", 1), 4, 1.0)
    core.due(9.0)
    core.update("b", message("b", 2), 4, 9.5)
    assert core.due(10.0) == [StopClients()]
    if first_is_done:
        assert core.evaluated(1, 0.5, 0.7, 14.0)[-1] == Evaluate(2)
    left = "model was" if first_is_done else "2 models were"
    done = core.due(15.0)
    note = f"the last {left} not evaluated: the run waits no longer"
    assert Log(events.Note(10.0, note)) in done
    assert done[-1] == Finish("after")


def test_evaluations_after_the_run_are_all_done_without_a_timeout() -> None:
    core, _ = started(
        stop=StopConditions(after=10.0),
        evaluate_every=2.0,
        evaluate_after=True,
        last_evaluation=LastEvaluation(timeout=None),
    )
    core.update("a", message("a", 1), 4, 1.0)
    assert core.due(2.0) == [Evaluate(1)]
    assert core.due(4.0) == []  # the same model
    core.update("b", message("b", 2), 4, 5.0)
    assert core.due(6.0) == [Evaluate(2)]  # though the other is not done
    assert core.due(10.0) == [StopClients()]
    assert core.ended == 10.0
    (note,) = records(core.due(11.5))
    assert note == events.Note(10.0, "the run is over and waits for its last 2 evaluations")
    assert core.next_timer is None
    assert core.evaluated(1, 0.5, 0.7, 100.0) == [Log(events.Evaluated(2.0, 1, 0.5, 0.7))]
    done = core.evaluated(2, 0.4, 0.8, 200.0)
    assert done[:1] == [Log(events.Evaluated(6.0, 2, 0.4, 0.8))]
    assert done[-1] == Finish("after")


def test_frozen_aggregator_ends_the_run_at_the_time_asked_for() -> None:
    """It stands still from 5 to 60 s. What waits for it then came too late, or is handled too late; the
    last evaluation is still waited for as long as ever."""
    stop, wait = StopConditions(after=10.0), LastEvaluation(timeout=30.0, dilation=1.0)
    core, _ = started(stop=stop, last_evaluation=wait)
    core.update("a", message("a", 1), 4, 5.0)
    actions = core.update("b", message("b", 2), 4, 60.0)
    assert records(actions) == [
        events.Disrupted(10.0, 10.0, "the aggregator ended the run 50.0 s late"),
        events.UpdateRejected(10.0, "b", "arrived after the run had ended", 2),
    ]
    assert actions[-1] == Evaluate(1)
    assert core.next_timer == 61.5  # the note that it waits
    assert records(core.evaluated(1, 0.5, 0.8, 61.0))[-1] == events.RunEnded(10.0, "after", 1, 1)

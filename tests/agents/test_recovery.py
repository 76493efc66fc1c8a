"""Recovery of a run whose messages were lost, or in which nothing happens any more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents import events
from agents.aggregator import actions as act
from agents.aggregator import inputs, storage
from agents.client.core import ClientCore, ClientIdentity, Outcome, Trained
from agents.device_actions import Crash, Pause, Resume, SetCpu
from agents.rules.asysg import AsySG
from agents.rules.defedavg_iid import DeFedAvgIid
from agents.rules.defedavg_niid import DeFedAvgNiid
from agents.rules.fedavg import FedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import ClientSide, RequestUpdate, Rule, Server
from agents.rules.port import Port
from agents.timing.nanoseconds import SECOND, from_seconds
from agents.wire.messages import ReportRequest
from agents.wire.payloads import ModelMessage
from tests.agents.helpers import Core, client_rule, done, make_core, message, of, records, started

LOST = "the aggregator had no connection to the broker"


def reconnected(core: Core, at: float = 5.0) -> act.Actions:
    return core.handle(inputs.Reconnected(int(at * SECOND), int(3 * SECOND)))


def reported(
    core: Core, client: str, dispatch: int, at: float = 5.0, *, about: int | None = None
) -> act.Actions:
    """`about`: as it was asked last, where nothing is given."""
    about = core.core._reports._asked_about.get(client, 0) if about is None else about
    return core.handle(inputs.Reported(int(at * SECOND), client, dispatch, about))


def silent(core: Core, at: float) -> float | None:
    since = core.core.silent_since(int(at * SECOND))
    return None if since is None else since / SECOND


def stalled(core: Core, since: float, at: float) -> act.Actions:
    return core.handle(inputs.Stalled(int(at * SECOND), int(since * SECOND)))


def test_all_clients_are_asked_for_a_report_after_a_reconnect() -> None:
    core, _ = started()
    done = reconnected(core)
    assert records(done) == [events.Disrupted(5.0, 3.0, LOST)]
    assert of(ReportRequest, done) == [ReportRequest("a", 1), ReportRequest("b", 2)]


def test_aggregator_downtime_is_recorded_and_not_taken_for_client_silence() -> None:
    core = answered()
    done = core.handle(inputs.Restarted(int(17 * SECOND), int(4 * SECOND)))
    assert done == [act.Log(events.Disrupted(17.0, 4.0, "the aggregator was away"))]
    assert silent(core, 18.1) is None
    assert silent(core, 32.1) == 17.0


def test_client_without_its_model_is_sent_one_after_its_report() -> None:
    core, _ = started()
    reconnected(core)
    assert reported(core, "a", 1) == []
    done = reported(core, "b", 0)
    assert of(act.Dispatch, done) == [act.Dispatch("b", 0, 3)]
    assert records(done) == [events.RoundUnfinished(5.0, "b", 0, 0.0, 5.0, 2)]
    late = core.update("b", message("b", 2), 4, 5.5)
    stray = events.UpdateRejected(5.5, "b", "answers dispatch 2, which is not open", 2)
    assert records(late) == [stray]
    assert reported(core, "b", 0) == []  # it was not asked again


def test_client_whose_update_was_lost_is_sent_the_model_again() -> None:
    core, server = started(FedAvg())
    core.update("a", message("a", 1), 4, 1.0)
    reconnected(core)
    assert reported(core, "a", 0) == []  # it waits for the round to end, as it should
    done = [*reported(core, "b", 0), *core.end_of_instant(5.0)]
    (again,) = of(act.Dispatch, done)
    assert again.client == "b"
    core.update("b", message("b", again.number), 4, 6.0)
    assert server.version == 1


def test_each_report_answers_its_own_request() -> None:
    """a is asked twice, and gets a model in between, which its first answer cannot know of. Once more
    asked, it has not got that model."""
    core, _ = started()
    reconnected(core)
    (new,) = of(act.Dispatch, core.update("a", message("a", 1), 4, 5.5))
    assert ReportRequest("a", new.number) in core.status("a", "ready", 6.0)
    assert reported(core, "a", 0, 6.1, about=1) == []
    assert reported(core, "a", new.number, 6.2, about=new.number) == []
    assert ReportRequest("a", new.number) in core.status("a", "ready", 7.0)
    assert len(of(act.Dispatch, reported(core, "a", 0, 7.1, about=new.number))) == 1
    assert reported(core, "a", 0, 7.2, about=new.number) == []


def test_client_without_a_report_is_absent() -> None:
    core, server = started()
    reconnected(core)
    reported(core, "a", 1)
    assert core.next_timer == 50.0
    done = core.due(50.0)
    assert events.ClientStatus(50.0, "b", "offline") in records(done)
    assert list(server.clients) == ["a"]
    assert [dispatch.client for dispatch in of(act.Dispatch, reported(core, "b", 2, 60.0))] == ["b"]
    assert list(server.clients) == ["a", "b"]  # it was only slow


def test_report_of_a_slow_client_is_awaited_longer() -> None:
    """A request waits behind a model that takes minutes."""
    core, server = started(silence={"b": from_seconds(600.0)})
    reconnected(core)
    core.due(50.0)
    assert list(server.clients) == ["b"]
    core.due(604.9)
    assert list(server.clients) == ["b"]
    core.due(605.0)
    assert list(server.clients) == []


def test_report_of_an_absent_client_does_not_bring_it_back() -> None:
    core, server = started()
    reconnected(core)
    core.status("b", "offline", 6.0)
    assert reported(core, "b", 2, 7.0) == []
    assert list(server.clients) == ["a"]


def test_client_reports_its_current_dispatch() -> None:
    rule = client_rule(ClientSide(send_buffer="hold"))
    client = ClientCore(ClientIdentity("run", "a", 10), lambda *_: 0, rule)
    assert client.works_on == 0
    client.on_model(model(3), 0)
    assert client.works_on == 3
    client.on_model(model(5), 0)
    assert client.works_on == 5
    client.on_trained(Trained(lambda: Outcome(np.zeros(1, np.float32), 0.0), 1, 0, 0))
    client.on_thought(0)
    assert client.works_on == 5
    client.pull(0)
    assert client.works_on == 5
    client.on_trained(Trained(lambda: Outcome(np.zeros(1, np.float32), 0.0), 1, 0, 0))
    client.on_thought(0)
    client.pull(0)
    assert client.works_on == 0


def model(dispatch: int) -> ModelMessage:
    return ModelMessage(
        run="run", version=0, dispatch=dispatch, schema="s", vector=np.zeros(1, np.float32)
    )


def answered(rule: Any = None, **settings: Any) -> Core:
    """A run in which a and b have handed in an update each, at 1 s and at 3 s."""
    core, _ = started(**({} if rule is None else {"rule": rule}), **settings)
    core.update("a", message("a", 1), 4, 1.0)
    core.update("b", message("b", 2), 4, 3.0)
    core.end_of_instant(3.0)
    return core


def test_silence_longer_than_any_round_is_recorded_and_busy_clients_are_asked() -> None:
    core = answered()
    assert silent(core, 3.0 + 15.0) is None  # five rounds of 3 s
    assert silent(core, 3.0 + 15.1) == 3.0
    done = stalled(core, 3.0, 18.1)
    assert records(done) == [events.Disrupted(18.1, 3.0, "nothing arrived")]
    assert of(ReportRequest, done) == [ReportRequest("a", 3), ReportRequest("b", 4)]
    assert silent(core, 20.0) is None
    assert silent(core, 34.0) is not None  # and again, if that did not help
    done = core.update("a", message("a", 3, base_version=1, sequence=2), 4, 35.0)
    assert records(done)[0] == events.Disrupted(35.0, 3.0, "nothing arrived")


def test_single_client_with_a_far_longer_round_is_named() -> None:
    core = answered()
    core.update("b", message("b", 4, base_version=1, sequence=2), 4, 6.0)
    core.end_of_instant(6.0)
    assert core.core.overdue(from_seconds(11.0)) == {}  # at least 10 s, and five rounds
    assert core.core.overdue(from_seconds(11.1)) == {"a": from_seconds(1.0)}
    core.update("a", message("a", 3, base_version=1, sequence=2), 4, 19.0)
    core.end_of_instant(19.0)
    assert core.core.overdue(from_seconds(19.0)) == {}


def test_stall_may_last_until_the_end_of_the_run() -> None:
    core = answered()
    stalled(core, 3.0, 18.1)
    core.end("interrupted", 20.0)
    (over,) = [r for r in records(core.evaluated(2, 0.1, 0.9, 20.0)) if isinstance(r, events.Disrupted)]
    assert over == events.Disrupted(20.0, 3.0, "nothing arrived")


def test_held_clients_are_not_missed() -> None:
    core = answered()
    progress = core.core.progress
    progress.note_action("a", Pause())
    assert silent(core, 1000.0) is None
    progress.note_action("a", Resume())
    assert silent(core, 1000.0) is None  # its next round has not ended yet
    core.update("a", message("a", 3, base_version=1, sequence=2), 4, 1000.0)
    core.end_of_instant(1000.0)
    assert silent(core, 7000.0) == 1000.0
    progress.note_action("b", SetCpu(0.01))
    assert silent(core, 7000.0) is None
    progress.note_action("b", Crash())
    core.status("b", "offline", 7000.0)
    assert silent(core, 7000.0) == 1000.0


def test_first_round_has_no_time_limit_unless_planned() -> None:
    core, _ = started()
    assert silent(core, 1e6) is None
    core, _ = started(patience={"a": 20 * SECOND, "b": 40 * SECOND})
    assert silent(core, 39.0) is None
    assert silent(core, 41.0) == 0.0


def test_stalled_rule_sends_models_again() -> None:
    core, server = started(FedAvg())
    assert list(server.clients) == ["a", "b"]
    core.core._dispatches.forget("a")  # as a rule would that forgot to answer
    core.core._dispatches.forget("b")
    assert silent(core, 1.0) is None
    assert silent(core, 2.5) == 0.0
    done = [*stalled(core, 0.0, 2.5), *core.end_of_instant(2.5)]
    assert of(act.Dispatch, done)


def test_no_silence_is_counted_while_the_run_clock_is_suspended() -> None:
    core = answered()
    reconnected(core)
    core.handle(inputs.Suspended(int(6 * SECOND), "2"))
    assert silent(core, 1000.0) is None
    assert reconnected(core, 1000.0) == []
    assert reported(core, "a", 0, 1000.0) == []
    assert core.next_timer is None or core.next_timer > 60


def test_open_requests_and_round_durations_are_in_the_checkpoint(tmp_path: Path) -> None:
    core = answered()
    core.core.progress.note_action("a", Pause())
    stalled(core, 3.0, 18.1)
    storage.save_snapshot(core.core, tmp_path / "checkpoint")
    core.core = storage.load_snapshot(tmp_path / "checkpoint")
    assert silent(core, 1000.0) is None
    core.core.progress.note_action("a", Resume())
    assert of(act.Dispatch, reported(core, "a", 0, 19.0))
    done = core.update("b", message("b", 4, base_version=2, sequence=2), 4, 35.0)
    assert records(done)[0] == events.Disrupted(35.0, 3.0, "nothing arrived")


def resumed(core: Core, clients: str, at: float) -> list[act.Action]:
    """Resume the run with new processes of `clients`, all of which are ready."""
    core.handle(inputs.Suspended(from_seconds(at), "2"))
    for name in clients:
        core.status(name, "joining", at)
        core.status(name, "ready", at)
    return [*core.start(epoch=200.0, at=at), *core.end_of_instant(at)]


@pytest.mark.parametrize(
    "rule", [FedBuff(buffer_size=2, reply="after_aggregation"), AsySG(gradients=2), Port(min_updates=2)]
)
def test_resuming_does_not_aggregate_before_the_buffer_is_full(rule: Rule) -> None:
    """b waits for the aggregation of its update, and a still trains."""
    core, server = started(rule)
    kind = rule.client_side.kind
    core.update("b", message("b", 2, kind=kind, **done(1.0)), 4, 1.0)
    actions = resumed(core, "ab", 1.0)
    assert server.version == 0
    (dispatch,) = [one for one in of(act.Dispatch, actions) if one.client == "a"]
    answer = message("a", dispatch.number, kind=kind, **done(2.0, epoch=200.0))
    found = records(core.update("a", answer, 4, 2.0))
    assert [one.client for one in found if isinstance(one, events.UpdateApplied)] == ["b", "a"]


def run_of(rule: Rule, clients: str, absent: str = "") -> tuple[Core, Server]:
    """A run of `clients`, of which those in `absent` have not joined."""
    core, server = make_core(rule, importance=dict.fromkeys(clients, 1 / len(clients)))
    for name in clients:
        if name not in absent:
            core.status(name, "ready", 0.0)
    core.start(epoch=100.0)
    core.end_of_instant(0.0)
    return core, server


def answer(core: Core, dispatches: Sequence[act.Dispatch], at: float) -> list[act.Action]:
    """All clients answer their dispatches of a resumed run."""
    actions: list[act.Action] = []
    for one in dispatches:
        fields = {"base_version": one.version, **done(at, epoch=200.0)}
        actions += core.update(one.client, message(one.client, one.number, **fields), 4, at)
    return [*actions, *core.end_of_instant(at)]


@pytest.mark.parametrize("back", ["abc", "ab", "bc", "abcd", "bcd"])
@pytest.mark.parametrize("answered", ["", "a", "b", "c", "ab", "ac", "bc"])
def test_rounds_after_a_resume_have_every_client_that_is_back(answered: str, back: str) -> None:
    """The round that was interrupted has the updates that had arrived, and those of the clients that are
    back. d was absent: it is in the next round, or in that one if nobody else is left in it."""
    core, server = run_of(FedAvg(), "abcd", absent="d")
    for name in answered:
        core.update(name, message(name, 1 + "abc".index(name), **done(1.0)), 4, 1.0)
    actions = resumed(core, back, 1.0)
    owing = {*"abc"} - {*answered}
    if owing & {*back}:
        assert server.version == 0
        assert {one.client for one in of(act.Dispatch, actions)} == owing & {*back}
        actions = answer(core, of(act.Dispatch, actions), 2.0)
        used = [one.client for one in records(actions) if isinstance(one, events.UpdateApplied)]
        assert {*used} == {*answered} | owing & {*back}
    assert server.version == 1
    assert [one.client for one in of(act.Dispatch, actions)] == [*back]


def test_round_of_a_resumed_run_that_had_lost_all_clients_has_all_of_them() -> None:
    core, _ = run_of(FedAvg(), "abc")
    for name in "abc":
        core.status(name, "offline", 1.0)
    assert core.ended == 1.0
    assert [one.client for one in of(act.Dispatch, resumed(core, "abc", 1.0))] == ["a", "b", "c"]


def test_request_of_a_round_is_sent_again_after_a_resume() -> None:
    """The round waits for the drawn clients, whose new processes know neither model nor request."""
    core, server = run_of(DeFedAvgNiid(sample=8), "ab")
    actions = resumed(core, "ab", 1.0)
    assert server.version == 0
    assert [one.client for one in of(act.Dispatch, actions)] == ["a", "b"]
    assert actions[-2:] == [RequestUpdate("a", "pull"), RequestUpdate("b", "pull")]


def test_client_of_a_rule_that_broadcasts_gets_a_model_after_a_resume() -> None:
    """b waits for the next broadcast, which needs the update of a."""
    core, server = run_of(DeFedAvgIid(buffer_size=2), "ab")
    core.update("b", message("b", 1, **done(1.0)), 4, 1.0)
    actions = resumed(core, "ab", 1.0)
    assert server.version == 0
    assert [one.client for one in of(act.Dispatch, actions)] == ["a"]


def test_model_that_an_interrupt_kept_back_is_sent_after_the_resume() -> None:
    """Models are sent at the end of the instant, in which the run is interrupted."""
    core, server = started(FedBuff(buffer_size=2, reply="after_aggregation"))
    for name, number in (("a", 1), ("b", 2)):
        core.update(name, message(name, number, **done(1.0)), 4, 1.0)
    core.end("interrupted", 1.0)
    actions = resumed(core, "ab", 1.0)
    assert server.version == 1
    assert [one.client for one in of(act.Dispatch, actions)] == ["a", "b"]

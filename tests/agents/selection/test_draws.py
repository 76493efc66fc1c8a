"""The draws of a run: checks of a selection, what the server knows, records, and rules that wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents import events
from agents.aggregator import actions as act
from agents.aggregator import storage
from agents.aggregator.core import AggregatorCore, Setup
from agents.aggregator.inputs import Settings
from agents.checks import DeclarationError
from agents.config import Named, StopConditions
from agents.pipeline.steps import ServerSteps
from agents.rules.defedavg_niid import DeFedAvgNiid
from agents.rules.favano import Favano
from agents.rules.fedavg import FedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Rule, Server
from agents.rules.port import Port
from agents.selection.charged import Charged
from agents.selection.draws import Draws
from agents.selection.interface import ClientSelection, Draw, ServerView
from agents.selection.round_robin import RoundRobin
from agents.timing.nanoseconds import SECOND, from_seconds
from agents.wire.payloads import UpdateMessage
from tests.agents.helpers import Core, done, message, records
from tests.agents.selection.helpers import draw, make_draws


@dataclass(frozen=True)
class Fixed(ClientSelection):
    """Returns what it is given."""

    chosen: Any
    among: Any = None

    def eligible(self, idle: Sequence[str], view: ServerView) -> Sequence[str]:
        return idle if self.among is None else self.among

    def choose(self, draw: Draw, view: ServerView, rng: np.random.Generator) -> Sequence[str]:
        return self.chosen  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("selection", "told"),
    [
        (Fixed(["a", "a"]), "choose of the selection mine returned a twice"),
        (Fixed(["x"]), "choose of the selection mine returned 'x', which is not an idle"),
        (Fixed(["c"], ["a", "b"]), "returned 'c', which is not an idle, eligible client"),
        (Fixed(["a", "b", "c"]), "returned 3 clients, expected at most 2"),
        (Fixed("a"), "returned 'a', expected a list of clients"),
        (Fixed(None), "returned None, expected a list"),
        (Fixed([3]), "returned 3, which is not an idle"),
        (Fixed([], ["x"]), "eligible of the selection mine returned 'x', which is not an idle client"),
        (Fixed([], ["a", "a"]), "eligible of the selection mine returned a twice"),
    ],
)
def test_wrong_choice_is_an_error_that_names_selection_and_client(
    selection: ClientSelection, told: str
) -> None:
    with pytest.raises(DeclarationError, match=told):
        draw(make_draws(selection), 2)


def test_a_client_may_be_chosen_twice_where_the_rule_draws_with_replacement() -> None:
    draws = make_draws(Fixed(["a", "a"]))
    assert draw(draws, 2, replacement=True) == ["a", "a"]
    assert draws.view.clients["a"].chosen == 1  # one draw


def test_the_view_has_what_updates_say() -> None:
    draws = make_draws(RoundRobin())
    draw(draws, 1)
    draws.note_round("a", loss=2.0, took=SECOND, staleness=3)
    draws.note_battery("a", 0.5, 1.5)
    draws.note_round("a", loss=2.0, took=3 * SECOND, staleness=1)
    draws.note_round("a", loss=float("nan"), took=8 * SECOND, staleness=1)
    draws.note_battery("a", 1.5, 9.0)
    seen = draws.view.clients["a"]
    assert (seen.loss, seen.duration, seen.mean_duration, seen.updates) == (None, 8.0, 4.0, 3)
    assert (seen.staleness, seen.chosen, seen.last_draw) == (1, 1, 1)
    assert (seen.battery, seen.battery_at) == (0.5, 1.5)  # the second level is impossible
    assert (seen.samples, seen.importance) == (10, 0.25)
    draws.note_join("a")
    assert seen.battery is None  # it may have been charged


def test_records_have_the_changes_of_the_eligible_clients() -> None:
    draws = make_draws(RoundRobin())
    draw(draws, 2)
    draw(draws, 1, idle="cd", at=1.0)
    draw(draws, 1, idle="dab", at=2.0)
    found, repeat = draws.pop_records()
    assert not repeat
    assert found == [
        events.ClientsDrawn(0.0, 1, 2, 4, "a b", "a b c d", ""),
        events.ClientsDrawn(1.0, 2, 1, 2, "c", "", "a b"),
        events.ClientsDrawn(2.0, 3, 1, 3, "d", "a b", "c"),
    ]
    assert draws.pop_records() == ([], False)


def test_draw_without_an_eligible_client_is_noted_once_and_repeated() -> None:
    draws = make_draws(Charged())
    for client in "abcd":
        draws.note_battery(client, 0.1, 0.0)
    assert draw(draws, 2) == []
    found, repeat = draws.pop_records()
    assert repeat
    assert draws.waits
    assert found == [
        events.ClientsDrawn(0.0, 0, 2, 0, "", "", ""),
        events.Note(
            0.0, "the selection mine chose none of 4 idle clients: the draw is repeated every 10 s"
        ),
    ]
    assert draw(draws, 2, at=10.0) == []
    assert draws.pop_records() == ([], True)
    assert draw(draws, 2, at=90_000.0) != []  # rechecked
    assert not draws.waits
    draws = make_draws(Fixed([]))
    assert draw(draws, 2) == []
    assert draws.waits
    draw(draws, 2, at=86_400.0)
    assert not draws.waits  # for a day


def _settings(rule: Rule, clients: Sequence[str]) -> Settings:
    return Settings(
        run="run",
        schema="s",
        side=rule.client_side,
        importance=dict.fromkeys(clients, 1 / len(clients)),
        samples=dict.fromkeys(clients, 10),
        stop=StopConditions(after=1e6),
        evaluate_every=from_seconds(1e6),
    )


def _core(rule: Rule, selection: ClientSelection, *clients: str) -> tuple[Core, Server]:
    """A core whose run clock has started at 100 s of the clients' clock with all `clients` present."""
    settings = _settings(rule, clients)
    population = settings.importance
    server = Server(np.zeros(1, np.float32), {}, np.random.default_rng(0), population=population)
    server.draws = draws = make_draws(selection, len(clients))
    state = rule.begin(server)
    core = Core(AggregatorCore(settings, state, server, ServerSteps([], 1), [draws]), state)
    for client in clients:
        core.status(client, "ready", at=0.0)
    return core, server


def _drawn(actions: Sequence[Any]) -> list[tuple[int, str]]:
    return [
        (one.eligible, one.chosen)
        for one in records(list(actions))
        if isinstance(one, events.ClientsDrawn)
    ]


@pytest.mark.parametrize(
    "rule",
    [
        FedBuff(buffer_size=1, concurrency=2),
        FedBuff(buffer_size=2, concurrency=2, replace="block"),
        Port(min_updates=1, concurrency=2),
        FedAvg(sample=2),
        FedAvg(sample=2, replacement=True),
        DeFedAvgNiid(sample=2),
    ],
    ids=["fedbuff", "block", "port", "fedavg", "replacement", "defedavg"],
)
def test_run_waits_for_an_eligible_client_and_goes_on(rule: Rule) -> None:
    core, server = _core(rule, Charged(recheck=None), "a", "b", "c")
    assert isinstance(server.draws, Draws)
    for client in "abc":
        server.draws.note_battery(client, 0.05, 0.0)
    assert _drawn(core.start(epoch=100.0)) == [(0, "")]
    assert core.next_timer == 10.0
    assert core.rule_waits
    assert core.core.silent_since(from_seconds(9.0)) is None
    assert _drawn(core.due(10.0)) == []
    server.draws.note_battery("b", 0.9, 0.0)
    assert _drawn(core.due(20.0)) == [(1, "b")]
    assert not server.draws.waits


def test_period_rule_waits_for_an_eligible_client() -> None:
    core, server = _core(Favano(period=5.0, sample=1), Charged(recheck=None), "a", "b")
    assert isinstance(server.draws, Draws)
    server.draws.note_battery("a", 0.05, 0.0)
    server.draws.note_battery("b", 0.05, 0.0)
    core.start(epoch=100.0)
    assert _drawn(core.due(5.0)) == [(0, "")]
    server.draws.note_battery("a", 0.5, 0.0)
    assert _drawn(core.due(10.0)) == [(1, "a")]


def test_fewer_eligible_than_wanted_train_and_the_rest_is_drawn_later() -> None:
    core, server = _core(FedBuff(buffer_size=1, concurrency=2), Charged(recheck=None), "a", "b", "c")
    assert isinstance(server.draws, Draws)
    server.draws.note_battery("a", 0.05, 0.0)
    server.draws.note_battery("c", 0.05, 0.0)
    assert _drawn(core.start(epoch=100.0)) == [(1, "b")]
    assert _drawn(core.update("b", message("b", 1), 100, at=1.0)) == [(1, "b")]
    server.draws.note_battery("c", 0.9, 0.0)
    assert _drawn(core.due(11.0)) == [(1, "c")]


def test_chosen_client_that_leaves_is_replaced_and_a_returning_one_is_eligible() -> None:
    core, _ = _core(FedBuff(buffer_size=1, concurrency=1), RoundRobin(), "a", "b", "c")
    assert _drawn(core.start(epoch=100.0)) == [(3, "a")]
    assert _drawn(core.status("a", "offline", at=1.0)) == [(2, "b")]
    assert _drawn(core.status("a", "ready", at=2.0)) == []  # b trains
    assert _drawn(core.update("b", message("b", 2, **done(3.0)), 100, at=3.0)) == [(3, "c")]


def test_updates_of_requested_clients_count_without_the_wait_on_the_device() -> None:
    core, server = _core(DeFedAvgNiid(sample=1), RoundRobin(), "a", "b")
    assert isinstance(server.draws, Draws)
    core.start(epoch=100.0)
    core.end_of_instant(0.0)
    core.update("a", message("a", 1), 100, at=0.5)  # trained until 0.375 s, sent at 0.5 s
    assert server.draws.view.clients["a"].duration == 0.375


@pytest.mark.parametrize("name", ["oort", "tifl", "fastest", "charged", "round_robin", "uniform"])
def test_state_of_a_selection_is_in_the_checkpoint(name: str, tmp_path: Path) -> None:
    """A core that is saved and loaded half-way draws as one that is not."""
    params = {"tiers": 2, "interval": 2, "credits": 2} if name == "tifl" else {}
    outcomes = []
    for saves in (False, True):
        rule = Named("fedbuff", {"buffer_size": 1, "concurrency": 2})
        setup = Setup(_settings(FedBuff(), "abcd"), rule, 3, Named(name, params))
        made, server = setup.core(np.zeros(1, np.float32))
        core, log = Core(made, made.rule), list[tuple[int, str]]()
        for client in "abcd":
            core.status(client, "ready", at=0.0)
        waiting = _dispatched(core.start(epoch=100.0))
        for step in range(30):
            if saves and step == 15:
                storage.save_snapshot((core.core, server), tmp_path / "state.bin")
                core.core, server = storage.load_snapshot(tmp_path / "state.bin")
            client, number = waiting.pop(0)
            at = 1.0 + step / 8
            sent = message(client, number, sequence=step + 1, loss=1.0 + step % 7)
            after = core.update(client, _timed(sent, at, core.core), 100, at=at)
            waiting += _dispatched(after)
            log += _drawn(after)
        outcomes.append(log)
    assert len(outcomes[0]) == 30
    assert outcomes[0] == outcomes[1]


def _timed(sent: UpdateMessage, at: float, core: AggregatorCore) -> UpdateMessage:
    """Return `sent` with the version that its dispatch had, and with times at `at`."""
    dispatch = core._dispatches.find(sent.client, sent.dispatch)
    assert dispatch is not None
    return replace(sent, base_version=dispatch.version, **done(at))


def _dispatched(actions: Sequence[Any]) -> list[tuple[str, int]]:
    return [(one.client, one.number) for one in actions if isinstance(one, act.Dispatch)]

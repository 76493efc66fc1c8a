"""Client behaviour beyond training and sending: buffers, pull, interrupt, memory, FedNova."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from agents.client import files
from agents.client.core import (
    Actions,
    ClientCore,
    ClientIdentity,
    CutShort,
    Outcome,
    Remember,
    SendUpdate,
    Think,
    Train,
    Trained,
)
from agents.config import LocalTraining
from agents.models.vectors import Vector
from agents.rules.client_half import ClientSettings, ClientState, SavedVectors, effective_steps
from agents.rules.favano import Favano, FavanoClient
from agents.rules.interface import ClientSide
from agents.wire.payloads import ModelMessage, UpdateMessage
from tests.agents.helpers import client_rule


def _client(
    known: SavedVectors | None = None, local: LocalTraining | None = None, **side: Any
) -> ClientCore:
    return _core(client_rule(ClientSide(**side), local, memory=known))


def _core(rule: ClientState) -> ClientCore:
    return ClientCore(ClientIdentity("run", "a", 10), lambda *_: 50, rule)


def _vector(*values: float) -> Vector:
    return np.array(values, np.float32)


def _model(dispatch: int, w: float = 0.0, **fields: Any) -> ModelMessage:
    return ModelMessage(
        run="run", version=dispatch, dispatch=dispatch, schema="s", vector=_vector(w), **fields
    )


def _trained(end: float, at: int = 100, steps: int = 4) -> Trained:
    return Trained(lambda: Outcome(_vector(end), 0.25), steps, at - 100, at)


def _sent(actions: Actions) -> list[UpdateMessage]:
    return [action.message() for action in actions if isinstance(action, SendUpdate)]


def _work(client: ClientCore, end: float, at: int = 100) -> Actions:
    """End the running training and its think time."""
    assert [type(action) for action in client.on_trained(_trained(end, at))] == [Think]
    return client.on_thought(at + 50)


def test_overwrite_continues_training_and_replaces_unfetched_updates() -> None:
    client = _client(send_buffer="overwrite")
    client.on_model(_model(1), 0)
    client.on_model(_model(2, w=10.0), 50)
    assert _work(client, end=1.0) == [Train(_model(2, w=10.0), 2)]
    assert _work(client, end=13.0, at=200) == []
    (update,) = _sent(client.pull(900))
    assert (update.dispatch, update.sequence, update.sent) == (2, 2, 900)
    assert update.vector.tolist() == [3.0]
    assert client.pull(950) == []  # fetched: nothing is there twice


def test_pull_is_served_from_the_send_buffer_during_training() -> None:
    client = _client(send_buffer="overwrite")
    client.on_model(_model(1), 0)
    _work(client, end=1.0)
    client.on_model(_model(2), 200)
    assert [update.dispatch for update in _sent(client.pull(250))] == [1]
    assert _work(client, end=2.0, at=300) == []  # the pull has had its update


def test_pull_waits_for_an_empty_send_buffer() -> None:
    client = _client(send_buffer="overwrite")
    client.on_model(_model(1), 0)
    assert client.pull(50) == []
    assert [update.dispatch for update in _sent(_work(client, end=1.0))] == [1]


def test_hold_trains_again_only_after_its_buffer_was_fetched() -> None:
    client = _client(send_buffer="hold")
    client.on_model(_model(1), 0)
    client.on_model(_model(2), 50)
    assert _work(client, end=1.0) == []
    client.on_model(_model(3), 200)
    send, train = client.pull(250)
    assert [update.dispatch for update in _sent([send])] == [1]
    assert train == Train(_model(3), 2)


def test_update_that_is_never_fetched_is_never_computed() -> None:
    client = _client(send_buffer="overwrite")
    client.on_model(_model(1), 0)

    def fail() -> Outcome:
        raise AssertionError("computed")

    client.on_trained(Trained(fail, 4, 0, 100))
    assert client.on_thought(150) == []


def test_interrupt_ends_training_and_sends_the_steps_done() -> None:
    client = _client()
    client.on_model(_model(1), 0)
    assert client.interrupt(50) == [CutShort()]
    (update,) = _sent(client.on_trained(_trained(end=1.5, steps=2)))
    assert (update.steps, update.vector.tolist(), update.sent) == (2, [1.5], 100)


def test_pull_and_interrupt_together_are_one_interrupt() -> None:
    for first, second in (("pull", "interrupt"), ("interrupt", "pull")):
        client = _client(send_buffer="hold")
        client.on_model(_model(1), 0)
        actions = [*getattr(client, first)(50), *getattr(client, second)(50)]
        assert actions == [CutShort()]
        assert len(_sent(client.on_trained(_trained(end=1.5, at=50, steps=2)))) == 1
        assert client.pull(60) == []  # it has been answered; this one waits for the next


def test_interrupt_ends_the_think_time() -> None:
    client = _client()
    client.on_model(_model(1), 0)
    client.on_trained(_trained(end=1.0))
    assert len(_sent(client.interrupt(125))) == 1
    assert client.on_thought(150) == []


def test_interrupt_of_an_idle_client_without_send_buffer_changes_nothing() -> None:
    client = _client()
    assert client.interrupt(0) == []
    client.on_model(_model(1), 100)
    assert len(_sent(_work(client, end=1.0))) == 1


def test_interrupt_sends_the_update_in_the_send_buffer() -> None:
    client = _client(send_buffer="hold")
    client.on_model(_model(1), 0)
    _work(client, end=1.0)
    assert len(_sent(client.interrupt(200))) == 1


def test_interrupt_sends_the_buffered_update_and_training_continues() -> None:
    client = _client(send_buffer="overwrite")
    client.on_model(_model(1), 0)
    _work(client, end=1.0)
    client.on_model(_model(2), 200)
    (update,) = _sent(client.interrupt(250))
    assert (update.dispatch, update.vector.tolist()) == (1, [1.0])
    assert [type(action) for action in client.on_trained(_trained(end=2.0, at=300))] == [Think]


def test_residual_is_relative_to_the_last_applied_end_point() -> None:
    client = _client(kind="residual")
    client.on_model(_model(1, w=5.0), 0)
    remember, send = _work(client, end=1.0)
    assert isinstance(remember, Remember)  # on the disk before the update leaves
    assert remember.memory["sent"] == (1, _vector(1.0))
    (first,) = _sent([send])
    assert (first.kind, first.vector.tolist()) == ("model", [1.0])  # it has no memory yet
    client.on_model(_model(2, acknowledged=1), 200)
    (second,) = _sent(_work(client, end=4.0))
    assert (second.kind, second.vector.tolist()) == ("residual", [3.0])
    client.on_model(_model(3, acknowledged=1), 300)  # the second was lost
    (third,) = _sent(_work(client, end=6.0))
    assert third.vector.tolist() == [5.0]


@pytest.mark.parametrize(("acknowledged", "residual"), [(7, 2.0), (6, 4.0)])
def test_restarted_client_continues_from_its_last_applied_update(
    tmp_path: Path, acknowledged: int, residual: float
) -> None:
    path = tmp_path / "memory.safetensors"
    assert files.load_memory(path) == {}
    files.save_memory({"applied": (6, _vector(1.0)), "sent": (7, _vector(3.0))}, path)
    client = _client(files.load_memory(path), kind="residual")
    assert client.on_model(_model(1, acknowledged=acknowledged), 0) == [
        Train(_model(1, acknowledged=acknowledged), 8)
    ]
    (update,) = _sent(_work(client, end=5.0))
    assert (update.kind, update.vector.tolist()) == ("residual", [residual])


def test_effective_steps_of_fednova() -> None:
    """By hand: 3 for plain SGD; momentum ½: 1 + 1.5 + 1.75; proximal ημ = 0.1: 1, 1.9, 2.71."""
    assert effective_steps(LocalTraining(), 0.1, 3) == 3
    assert effective_steps(LocalTraining(momentum=0.5), 0.1, 3) == 4.25
    assert effective_steps(LocalTraining(proximal=1.0), 0.1, 3) == pytest.approx(2.71)


@pytest.mark.parametrize(("proximal", "told"), [(0.0, 2.0), (2.5, 4.0)])
def test_fednova_sends_the_normalised_delta(proximal: float, told: float) -> None:
    """With a proximal term the server uses the number of steps, not a_i; otherwise with momentum 0 and 2
    of 4 steps."""
    local = LocalTraining(
        steps=4, lr=0.4, proximal=proximal, fednova=True
    )  # ημ = 1: a = 1 whatever the steps
    client = _client(local=local)
    client.on_model(_model(1, w=1.0), 0)
    client.on_trained(_trained(end=9.0, steps=4 if proximal else 2))
    (update,) = _sent(client.on_thought(200))
    assert update.vector.tolist() == [8.0 if proximal else 4.0]
    assert update.effective_steps == told


def test_fednova_uses_the_step_size_sent_with_the_model() -> None:
    """ημ = 0.4 · 2.5 = 1, so that a = 1 after 4 steps, and not 2.73 as with the client's own 0.1."""
    client = _client(local=LocalTraining(steps=4, lr=0.1, proximal=2.5, fednova=True))
    client.on_model(_model(1, w=1.0, lr=0.4), 0)
    client.on_trained(_trained(end=9.0))
    (update,) = _sent(client.on_thought(200))
    assert update.vector.tolist() == [8.0]


def test_favano_divides_by_the_clients_own_step_history() -> None:
    """E = 4, 0, 2. P(E > 0)·E: 4, ½·0, ⅔·2; E[E]: 4, 2, 2."""
    stochastic, deterministic = _favano("stochastic"), _favano("deterministic")
    assert [stochastic.divisor(e) for e in (4, 0, 2)] == pytest.approx([4, 0, 4 / 3])
    assert [deterministic.divisor(e) for e in (4, 0, 2)] == pytest.approx([4, 2, 2])


def _favano(debias: Literal["stochastic", "deterministic"]) -> FavanoClient:
    rule = Favano(period=1.0, sample=1, debias=debias)
    return rule.begin_client(ClientSettings(local=LocalTraining(steps=4)))


def test_favano_sends_the_start_plus_the_divided_progress() -> None:
    client = _core(_favano("stochastic"))
    client.on_model(_model(1, w=1.0), 0)
    client.interrupt(50)
    (update,) = _sent(client.on_trained(_trained(end=9.0, steps=2)))
    assert (update.kind, update.vector.tolist()) == ("model", [5.0])  # 1 + 8/2


@pytest.mark.parametrize("kind", ["residual", "delta"])
def test_sequence_numbers_continue_after_the_acknowledged_one(kind: str) -> None:
    """Everything drawn by the number continues too: mini-batches, `timing`, an attack's noise."""
    client = _client(kind=kind)
    assert client.on_model(_model(1, acknowledged=5), 0) == [Train(_model(1, acknowledged=5), 6)]


def test_memory_with_only_a_sent_update_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "memory.safetensors"
    files.save_memory({"sent": (3, _vector(1.0))}, path)
    known = files.load_memory(path)
    assert {name: (number, one.tolist()) for name, (number, one) in known.items()} == {
        "sent": (3, [1.0])
    }

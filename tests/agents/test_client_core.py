"""The client's state machine."""

from __future__ import annotations

import numpy as np
import pytest

from agents.client.core import ClientCore, Identity, Outcome, SendUpdate, Think, Train, Trained
from agents.config import Local
from agents.rules.interface import ClientSide
from agents.wire import FAREWELL, ModelMessage, UpdateMessage

VECTOR = np.array([0.25], np.float32)


def _client(think: float = 0.0) -> ClientCore:
    identity = Identity("run", "a", samples=10, side=ClientSide(), local=Local(steps=20))
    return ClientCore(identity, lambda _: think)


def _model(dispatch: int, version: int = 0) -> ModelMessage:
    return ModelMessage("run", version, dispatch, "s", np.zeros(1, np.float32))


def _trained(at: float) -> Trained:
    return Trained(lambda: Outcome(VECTOR, loss=0.5), steps=20, started=at - 2, ended=at)


def test_a_model_is_trained_thought_over_and_answered() -> None:
    client = _client(think=1.5)
    assert client.model(_model(17, version=4), at=100.0) == [Train(_model(17, version=4), sequence=1)]
    assert client.trained(_trained(at=103.0)) == [Think(1.5)]
    (send,) = client.thought(at=104.5)
    assert isinstance(send, SendUpdate)
    assert send.message() == UpdateMessage(
        run="run",
        client="a",
        sequence=1,
        dispatch=17,
        base_version=4,
        schema="s",
        kind="delta",
        samples=10,
        steps=20,
        effective_steps=1.0,
        loss=0.5,
        downloaded=100.0,
        train_start=101.0,
        train_end=103.0,
        sent=104.5,
        vector=VECTOR,
    )


def test_every_training_has_the_next_sequence_number() -> None:
    client = _client()
    for sequence in (1, 2, 3):
        assert client.model(_model(sequence), at=0.0) == [Train(_model(sequence), sequence)]
        client.trained(_trained(at=3.0))
        client.thought(at=3.0)


def test_the_newest_model_that_came_meanwhile_is_next() -> None:
    client = _client()
    client.model(_model(1), at=0.0)
    assert client.model(_model(2, version=1), at=1.0) == []
    client.trained(_trained(at=3.0))
    assert client.model(_model(3, version=2), at=3.5) == []  # overwrites the one in the receive buffer
    send, train = client.thought(at=4.0)
    assert isinstance(send, SendUpdate)
    assert send.message().dispatch == 1
    assert train == Train(_model(3, version=2), sequence=2)
    client.trained(_trained(at=7.0))
    (send,) = client.thought(at=7.0)  # nothing waits any more
    assert isinstance(send, SendUpdate)
    assert (send.message().dispatch, send.message().downloaded) == (3, 3.5)


def test_a_redelivered_model_is_not_trained_twice() -> None:
    client = _client()
    client.model(_model(1), at=0.0)
    assert client.model(_model(1), at=0.5) == []
    client.trained(_trained(at=3.0))
    assert len(client.thought(at=3.0)) == 1
    assert client.model(_model(1), at=3.5) == []


def test_thoughts_after_an_interrupt_are_no_news() -> None:
    assert _client().thought(at=0.0) == []


def test_training_that_nobody_asked_for_is_a_mistake_of_ours() -> None:
    with pytest.raises(RuntimeError, match="without a training"):
        _client().trained(_trained(at=0.0))


def test_who_leaves_hands_in_what_it_remembers() -> None:
    """The model of its last update, and the one before, as it does not know which was applied."""
    side = ClientSide(kind="residual")
    client = ClientCore(Identity("run", "a", 10, side, Local(steps=20)), lambda _: 0.0)
    assert client.leave(at=1.0) == []
    client.model(_model(1), at=1.0)
    client.trained(_trained(at=3.0))
    client.thought(at=3.0)
    (farewell,) = client.leave(at=4.0)
    assert isinstance(farewell, SendUpdate)
    told = farewell.message()
    assert (told.kind, told.sequence, told.schema, told.vector) == (FAREWELL, 1, "s", VECTOR)


def test_who_remembers_nothing_just_leaves() -> None:
    client = _client()
    client.model(_model(1), at=0.0)
    assert client.leave(at=1.0) == []

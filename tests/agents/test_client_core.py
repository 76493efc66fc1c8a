"""The client's state machine."""

from __future__ import annotations

import numpy as np
import pytest

from agents.client.core import ClientCore, ClientIdentity, Outcome, SendUpdate, Think, Train, Trained
from agents.rules.interface import ClientSide
from agents.wire.payloads import FAREWELL, ModelMessage, UpdateMessage
from tests.agents.helpers import client_rule

VECTOR = np.array([0.25], np.float32)


def _client(think: int = 0) -> ClientCore:
    return ClientCore(ClientIdentity("run", "a", samples=10), lambda *_: think, client_rule())


def _model(dispatch: int, version: int = 0, acknowledged: int = 0) -> ModelMessage:
    w = np.zeros(1, np.float32)
    return ModelMessage(
        run="run", version=version, dispatch=dispatch, schema="s", vector=w, acknowledged=acknowledged
    )


def _trained(at: int) -> Trained:
    return Trained(lambda: Outcome(VECTOR, loss=0.5), steps=20, started=at - 200, ended=at)


def test_model_is_trained_and_answered_after_the_think_time() -> None:
    client = _client(think=150)
    assert client.on_model(_model(17, version=4), at=10000) == [Train(_model(17, version=4), sequence=1)]
    assert client.on_trained(_trained(at=10300)) == [Think(150)]
    (send,) = client.on_thought(at=10450)
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
        downloaded=10000,
        train_start=10100,
        train_end=10300,
        sent=10450,
        vector=VECTOR,
    )


def test_newest_received_model_is_trained_next() -> None:
    client = _client()
    client.on_model(_model(1), at=0)
    assert client.on_model(_model(2, version=1), at=100) == []
    client.on_trained(_trained(at=300))
    assert client.on_model(_model(3, version=2), at=350) == []  # overwrites the buffered one
    send, train = client.on_thought(at=400)
    assert isinstance(send, SendUpdate)
    assert send.message().dispatch == 1
    assert train == Train(_model(3, version=2), sequence=2)
    client.on_trained(_trained(at=700))
    (send,) = client.on_thought(at=700)  # nothing waits any more
    assert isinstance(send, SendUpdate)
    assert (send.message().dispatch, send.message().downloaded) == (3, 350)


@pytest.mark.parametrize(
    ("side", "since"),
    [(ClientSide(), 400), (ClientSide(send_buffer="hold"), 500)],  # the latter: when it was fetched
)
def test_think_time_starts_when_the_training_could_begin(side: ClientSide, since: int) -> None:
    told: list[int] = []

    def think(elapsed: int) -> int:
        told.append(elapsed)
        return 0

    client = ClientCore(ClientIdentity("run", "a", samples=10), think, client_rule(side))
    client.on_model(_model(1), at=100)
    client.on_model(_model(2), at=200)  # waits
    client.on_trained(_trained(at=400))
    client.on_thought(at=400)
    client.pull(at=500)
    client.on_trained(_trained(at=700))
    client.on_thought(at=750)
    client.pull(at=760)
    client.on_model(_model(3), at=1000)
    client.on_trained(_trained(at=1300))
    assert told == [300, 700 - since, 300]


def test_redelivered_model_is_not_trained_twice() -> None:
    client = _client()
    client.on_model(_model(1), at=0)
    assert client.on_model(_model(1), at=50) == []
    client.on_trained(_trained(at=300))
    assert len(client.on_thought(at=300)) == 1
    assert client.on_model(_model(1), at=350) == []


def test_end_of_think_time_after_an_interrupt_is_ignored() -> None:
    assert _client().on_thought(at=0) == []


def test_training_that_was_not_requested_is_an_internal_error() -> None:
    with pytest.raises(RuntimeError, match="without a training"):
        _client().on_trained(_trained(at=0))


def test_leaving_client_sends_its_memory() -> None:
    """The model of its last update, and the one before, as it does not know which was applied."""
    side = ClientSide(kind="residual")
    client = ClientCore(ClientIdentity("run", "a", 10), lambda *_: 0, client_rule(side))

    def farewells() -> list[tuple[str, int, list[float]]]:
        sent = [one.message() for one in client.leave(at=400) if isinstance(one, SendUpdate)]
        return [(told.kind, told.sequence, told.vector.tolist()) for told in sent]

    assert farewells() == [(FAREWELL, 0, [])]
    client.on_model(_model(1), at=100)
    client.on_trained(_trained(at=300))
    client.on_thought(at=300)
    assert farewells() == [(FAREWELL, 0, []), (FAREWELL, 1, [0.25])]
    client.on_model(_model(2, acknowledged=1), at=500)
    assert farewells() == [(FAREWELL, 1, [0.25])]


def test_leaving_client_without_memory_sends_no_farewell() -> None:
    client = _client()
    client.on_model(_model(1), at=0)
    assert client.leave(at=100) == []

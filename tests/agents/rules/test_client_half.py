"""The client half of a rule with memory, vectors and terms of its own: `ClientHalf`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.checks import DeclarationError
from agents.client import files
from agents.client.core import ClientCore, ClientIdentity, Outcome, Remember, SendUpdate, Train, Trained
from agents.config import LocalTraining, Schedule
from agents.models.vectors import Vector
from agents.pipeline.interface import ClientStep
from agents.rules.client_half import (
    Answer,
    ClientHalf,
    ClientSettings,
    ClientSide,
    LocalResult,
    SavedVectors,
    Terms,
    Vectors,
)
from agents.wire.payloads import Encoded, ModelMessage, UpdateMessage
from tests.agents.helpers import compressor

SIDE = ClientSide(
    model_vectors={"pull": "model"},
    update_vectors={"ends": "model", "count": 1},
    compressed=["ends"],
    memory={"ends": "model", "count": 1},
    adds_terms=True,
)


class Counting(ClientHalf):
    """Counts its updates and sums up their ends, which it sends; its terms are what it remembers."""

    def terms(self, model: ModelMessage, memory: Vectors) -> Terms:
        return Terms(memory.get("ends"), proximal=float(memory["count"][0]) if memory else 0.0)

    def answer(self, result: LocalResult) -> Answer:
        ends = result.memory.get("ends", np.zeros(2)) + result.end + result.model.vectors["pull"]
        count = result.memory.get("count", np.zeros(1)) + 1
        known = {"count": count, "ends": ends}
        return Answer(vectors=known, memory=known, vector=result.end * np.float32(result.lr_sum))


def core(
    memory: SavedVectors | None = None,
    local: LocalTraining | None = None,
    steps: tuple[ClientStep, ...] = (),
    half: type[ClientHalf] = Counting,
    side: ClientSide = SIDE,
) -> ClientCore:
    settings = ClientSettings(local=local or LocalTraining(steps=2, lr=0.5), memory=memory)
    return ClientCore(ClientIdentity("run", "a", 10), lambda *_: 0, half(side, settings), steps)


def model(dispatch: int, acknowledged: int = 0, **vectors: Vector) -> ModelMessage:
    return ModelMessage(
        run="run", version=dispatch, dispatch=dispatch, schema="s", acknowledged=acknowledged,
        vector=np.zeros(2, np.float32), vectors=vectors or {"pull": np.ones(2, np.float32)},
    )  # fmt: skip


def train(client: ClientCore, received: ModelMessage, steps: int = 2) -> tuple[Terms, SavedVectors, Any]:
    """Terms of the training from `received`, saved memory and message of its update; it ends at 1."""
    (begun,) = client.on_model(received, 0)
    assert isinstance(begun, Train)
    client.on_trained(Trained(lambda: Outcome(np.ones(2, np.float32), 0.5), steps, 0, 1))
    remember, send = client.on_thought(2)
    assert isinstance(remember, Remember)
    assert isinstance(send, SendUpdate)
    return begun.terms, remember.memory, send.message()


def counted(update: UpdateMessage) -> float:
    count = update.vectors["count"]
    assert not isinstance(count, Encoded)
    return float(count[0])


def test_client_sends_vectors_and_trains_with_what_it_remembers() -> None:
    client = core()
    terms, _, update = train(client, model(1))
    assert not terms
    assert update.vector.tolist() == [1.0, 1.0]  # 2 steps of 0.5
    assert list(update.vectors) == ["ends", "count"]  # as declared
    assert update.vectors["ends"].tolist() == [2.0, 2.0]
    terms, _, update = train(client, model(2, acknowledged=1))
    assert terms.linear is not None
    assert (terms.linear.tolist(), terms.proximal) == ([2.0, 2.0], 1.0)
    assert counted(update) == 2


@pytest.mark.parametrize(
    ("acknowledged", "then"),
    [(2, 3.0), (1, 2.0), (0, 1.0), (7, 3.0)],
    ids=["taken", "not taken", "goodbye or lost run", "unknown"],
)
def test_memory_is_that_of_the_last_update_that_the_server_took(acknowledged: int, then: float) -> None:
    client = core()
    train(client, model(1))
    train(client, model(2, acknowledged=1))
    assert counted(train(client, model(3, acknowledged=acknowledged))[2]) == then


@pytest.mark.parametrize(("acknowledged", "then"), [(2, 3.0), (1, 2.0)])
def test_memory_survives_a_restart_of_the_client(acknowledged: int, then: float, tmp_path: Path) -> None:
    """It is saved before the update is sent. The vectors have different lengths."""
    client = core()
    train(client, model(1))
    _, memory, _ = train(client, model(2, acknowledged=1))
    files.save_memory(memory, tmp_path / "memory")
    client = core(files.load_memory(tmp_path / "memory"))
    _, _, update = train(client, model(3, acknowledged=acknowledged))
    assert counted(update) == then
    assert update.sequence == 3


def test_sum_of_step_sizes_follows_schedule_and_interrupt() -> None:
    """Steps of 0.5 and 0.25; the third is not done."""
    local = LocalTraining(steps=3, lr=0.5, lr_by_step=Schedule(shape="exponential", over=1, to=0.5))
    _, _, update = train(core(local=local), model(1), steps=2)
    assert update.vector.tolist() == [0.75, 0.75]


def test_only_declared_vectors_are_compressed() -> None:
    """Each with an error of its own: top-k sends one of two values of `ends` a time."""
    client = core(steps=(compressor("topk", share=0.5),))
    _, _, update = train(client, model(1, pull=np.array([0.5, 0.0], np.float32)))
    assert update.encoded is not None
    ends = update.vectors["ends"]
    assert isinstance(ends, Encoded)
    assert ends.arrays["values"].tolist() == [1.5]
    assert counted(update) == 1
    _, _, update = train(client, model(2, acknowledged=1, pull=np.zeros(2, np.float32)))
    assert update.vectors["ends"].arrays["values"].tolist() == [3.0]  # 2 + the 1 that was left out


def _answering(**answer: Any) -> type[ClientHalf]:
    class Half(ClientHalf):
        def answer(self, result: LocalResult) -> Answer:
            return Answer(**answer)

    return Half


@pytest.mark.parametrize(
    ("half", "reason"),
    [
        (_answering(), "answer: no vector ends, which the rule declares"),
        (
            _answering(vectors=dict.fromkeys(("ends", "count", "more"), np.zeros(1))),
            "answer: a vector more, which the rule does not declare",
        ),
        (
            _answering(vectors={"ends": np.zeros(3), "count": np.zeros(1)}),
            r"answer: vector ends has the shape \(3,\), expected \(2,\)",
        ),
        (
            _answering(vectors={"ends": np.zeros(2), "count": np.zeros(1)}),
            "answer, memory: no vector ends",
        ),
        (
            _answering(
                vectors={"ends": np.zeros(2), "count": np.zeros(1)},
                memory={"ends": np.zeros(2), "count": np.zeros(1)},
                vector=np.zeros(1),
            ),
            r"vector update has the shape \(1,\), expected \(2,\)",
        ),
    ],
)
def test_what_is_not_declared_is_an_error_of_the_rule(half: type[ClientHalf], reason: str) -> None:
    with pytest.raises(DeclarationError, match=reason):
        train(core(half=half), model(1))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"memory": {"Big": "model"}}, "memory has the name 'Big', expected lower-case letters"),
        ({"update_vectors": {"a": 0}}, "update_vectors gives a the length 0, expected model, or"),
        ({"model_vectors": {"a": "d"}}, "model_vectors gives a the length 'd', expected model"),
        ({"compressed": ["b"]}, "compressed names b, which is not in update_vectors"),
        ({"kind": "gradient", "adds_terms": True}, "adds_terms needs local steps"),
    ],
)
def test_invalid_declarations_are_refused(fields: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ClientSide(**fields)

"""The interface between the conformance kit and an implementation of an aggregation rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = NDArray[np.float64]
"""A vector of shape (d,)."""
Kind = Literal["delta", "model", "gradient", "residual"]
"""Content of `ClientUpdate.vector`. `delta`: end minus start of the local training. `model`: the model
that the server mixes in, usually the end of the local training. `gradient`: gradient at the base model.
`residual` (AREA): the end minus the end of the client's previous local training."""


@dataclass(frozen=True)
class Client:
    """A client of a scenario."""

    importance: float
    """p_i, the importance of the client. The values of all clients of a scenario sum to 1."""
    samples: int
    """Number of training samples."""


@dataclass(frozen=True)
class Setting:
    """All that an implementation must know before a scenario starts."""

    rule: str
    """Name of the rule, as in `fl-conformance --list`."""
    parameters: Mapping[str, Any]
    """Parameters of the rule. A parameter that is missing has its default, which
    `reference.py` has as `defaults` of the rule."""
    clients: Mapping[str, Client]
    """All clients of the scenario, in device order, whether they are present at the start or not."""
    present: Sequence[str]
    """Clients that are present at the start, in device order."""
    model: Vector
    """First model (version 0), shape (d,)."""
    draws: Sequence[Sequence[str]]
    """Clients that each round draws, in order of the rounds; empty if the rule draws no clients. A
    client that is drawn twice is listed twice."""
    intervals: Sequence[float]
    """Seconds between aggregations, if they are drawn at random (AREA, `criterion: random`); otherwise
    empty."""


@dataclass(frozen=True)
class ClientUpdate:
    """An update that a client hands in. The vectors are copies: an adapter may keep or change them."""

    client: str
    at: float
    """Time of the arrival, in seconds since the start."""
    dispatch: int
    """Number of the dispatch that the update answers. Dispatches are counted from 1 over all clients, in
    the order of the calls of `model` with a client."""
    base_version: int
    """Version of the model that the client trained from."""
    base: Vector
    """Model that the client trained from, shape (d,)."""
    kind: Kind
    """Content of `vector`."""
    vector: Vector
    """Vector that a client of this rule sends, shape (d,)."""
    trained: Vector | None
    """End of the local training, shape (d,); None if the client sends a gradient."""
    samples: int
    """Number of training samples of the client."""
    steps: int
    """Number of local steps done."""
    effective_steps: float
    """FedNova: the effective number a_i of local steps by which `vector` was divided; otherwise 1."""
    sent: float
    """Time at which the base model was sent to the client, in seconds."""
    uploaded: float
    """Time at which the client began to send the update, in seconds; at most `at`."""


class Adapter(Protocol):
    """An implementation of aggregation rules, as the kit uses it.

    The kit makes a new object for each scenario and calls `start` once. Then it calls the other methods
    in order of time. Within one instant, it calls `join`, `leave` and `receive` in the recorded order,
    which is the order of the devices. It calls `model` for each model that a client is sent, at each new
    version, and at the end of each instant.

    A rule with a period (FedFix, FAVANO, AREA) aggregates at each multiple of the period: after all
    arrivals of this instant, and before `model(at)` returns. Ticks before `at` come first in any method.
    """

    def start(self, setting: Setting) -> None:
        """Begin a scenario. Raise NotImplementedError to skip a variant that is not implemented; the kit
        reports the message."""

    def receive(self, update: ClientUpdate) -> None:
        """Handle an update. Updates of absent clients and repeated updates must change nothing."""

    def model(self, at: float, client: str | None = None) -> ArrayLike:
        """Return the global model at the time `at` in seconds, shape (d,).

        `client`: the client that is sent the model at this moment; None if the model is only read. A
        server that stamps models with versions does it here.
        """

    def join(self, client: str, at: float) -> None:
        """Handle the join of `client` at the time `at` in seconds, for the first time or again."""

    def leave(self, client: str, at: float, memory: ArrayLike | None = None) -> None:
        """Handle the leave of `client` at the time `at` in seconds.

        `memory`: the vector y_i that a client hands in when it says goodbye (AREA), shape (d,); None if
        the client vanished, or if the rule's clients have no memory.
        """

"""The interface of selections. A selection decides which idle clients train next, beside any rule that
draws clients.

A selection is a frozen dataclass. Its fields are the keys that a topology may set. Its methods are pure:
the same arguments must give the same clients, because replay and resuming after a crash depend on this.
Randomness comes from the generator that is passed. A selection remembers something until the next draw
only in `ServerView.memory`, which the aggregator saves.

A complete selection that can serve as a template. It prefers clients with a high loss:

    @dataclass(frozen=True)
    class HighestLoss(ClientSelection):
        needs_loss: ClassVar[bool] = True

        def choose(self, draw: Draw, view: ServerView, rng: np.random.Generator) -> list[str]:
            def loss(client: str) -> float:
                last = view.clients[client].loss
                return math.inf if last is None else last  # a new client trains first

            return sorted(draw.idle, key=loss, reverse=True)[: draw.count]
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from agents.rules.interface import RuleDraw


@dataclass(slots=True)
class ClientView:
    """Facts about a client that the server knows."""

    importance: float
    """Importance p_i; the sum over the clients of the run is 1."""
    samples: int
    """Number of training samples; 1 if it is unknown."""
    loss: float | None = None
    """Mean training loss that the client reported with its last update, at least 0; None if it has not
    reported such a number yet."""
    duration: float | None = None
    """Duration of the client's last round in seconds, from the dispatch of the model to the arrival of
    the update; None before the first update. If updates wait on the device until the server requests
    them, without this wait."""
    mean_duration: float | None = None
    """Mean of the durations of all rounds so far, in seconds; None before the first update."""
    updates: int = 0
    """Number of valid updates so far."""
    staleness: int | None = None
    """Number of versions that were made while the client trained for its last update; None before the
    first update."""
    chosen: int = 0
    """Number of draws that chose the client."""
    last_draw: int = 0
    """Number of the last draw that chose the client; 0 if no draw has chosen it."""
    battery: float | None = None
    """Battery level that the client reported last, from 0 to 1; None if it has not reported a level
    since it joined. Devices with a battery report their level with each update."""
    battery_at: float = 0.0
    """Device time of that report in seconds."""


@dataclass(slots=True)
class ServerView:
    """Facts that the server knows at the time of a draw."""

    clients: dict[str, ClientView]
    """Every client of the run, in device order, including clients that are absent."""
    draw: int = 0
    """Number of this draw, starting with 1. A draw with no eligible client is not counted."""
    at: float = 0.0
    """Device time in seconds."""
    version: int = 0
    """Version of the global model."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Memory of the selection: empty before its first draw. `choose` may change it. Values: numbers,
    texts, None, lists, dicts, NumPy arrays."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw that a rule asks for."""

    idle: Sequence[str]
    """The eligible clients, at least one. In device order, except for a rule that draws one client at a
    time: then in an order that changes from draw to draw."""
    count: int
    """Number of clients that the rule wants, at least 1. The selection may choose fewer."""
    replacement: bool = False
    """Whether the rule draws with replacement. A client may then be chosen several times, and its update
    counts as often."""
    of_rule: RuleDraw | None = None
    """The rule's own uniform draw; None if not all idle clients are eligible."""

    def uniform(self, rng: np.random.Generator) -> list[str]:
        """Return clients drawn uniformly, exactly as the rule draws them without a selection. If not all
        idle clients are eligible, return clients drawn uniformly without replacement."""
        if self.of_rule is not None:
            return self.of_rule(rng)
        drawn = rng.choice(len(self.idle), min(self.count, len(self.idle)), replace=False)
        return [self.idle[i] for i in drawn]


class ClientSelection(Protocol):
    """The parameters of a selection, with its methods."""

    paper: ClassVar[str] = ""
    """Source of the selection: authors, year, and where to read it."""

    @property
    def needs_loss(self) -> bool:
        """Whether the selection needs the losses that clients report. With privacy, losses are
        hidden."""
        return False

    @property
    def needs_battery(self) -> bool:
        """Whether the selection needs the battery levels that clients report."""
        return False

    def check(self, clients: int) -> None:
        """Raise ValueError if these parameters cannot work with `clients` clients."""
        return  # mypy takes a method without a body as abstract

    def eligible(self, idle: Sequence[str], view: ServerView) -> Sequence[str]:
        """Return the clients of `idle` that may be chosen, in the same order. If there are none, the
        draw is repeated after some time."""
        return idle

    @abstractmethod
    def choose(self, draw: Draw, view: ServerView, rng: np.random.Generator) -> Sequence[str]:
        """Return at most `draw.count` clients of `draw.idle`. No client may be returned twice, except if
        `draw.replacement` is true."""


def by_weight(
    clients: Sequence[str], weights: Sequence[float], count: int, rng: np.random.Generator
) -> list[str]:
    """Return `count` of `clients`, or all if there are fewer, drawn without replacement with
    probabilities proportional to `weights`, which are finite and at least 0. Clients of weight 0 are
    chosen only if there are too few others."""
    count = min(count, len(clients))
    shares = np.asarray(weights, np.float64)
    if count < 1:
        return []
    top = shares.max()
    shares = shares / top if top > 0 else np.ones(len(clients))
    shares = np.maximum(shares, 1e-12)
    drawn = rng.choice(len(clients), count, replace=False, p=shares / shares.sum())
    return [clients[i] for i in drawn]

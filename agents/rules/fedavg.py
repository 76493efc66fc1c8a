"""FedAvg, synchronous (McMahan et al. 2017, arXiv 1602.05629)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from agents.checks import at_least, duration, positive
from agents.rules.interface import (
    Action,
    Actions,
    Aggregated,
    ClientSide,
    Ignored,
    Rule,
    Send,
    Server,
    SetTimer,
    State,
    Update,
)
from agents.rules.parts import RobustSum, SumOfModels, Trim, check_trim
from agents.timing.nanoseconds import from_seconds


@dataclass(frozen=True)
class FedAvg(Rule):
    """Send w to all clients (or to `sample` of them) in each round, and wait for all of their updates:

        w ← w + η_g τ_eff Σ_{i∈S} p'_i Δ_i

    S are the n clients of the round, of N clients. p' is the importance p renormalised over S. A client
    that was drawn m times counts m times (Fraboni et al. 2023, (3); Wang et al., DeFedAvg, (2)-(3),
    where (3) is printed with the wrong sign). The mean over S is biased if a round samples clients and p
    is not uniform. With `weights: unbiased`, p'_i = p_i N/n (Fraboni et al. 2023, Appendix C).

    A selected client is dropped from the round if it goes offline, does not answer within
    `round_timeout`, or sends an update that is rejected. If all selected clients are dropped, w is
    unchanged. A client that joins, for the first time or again, takes part from the next round on.

    τ_eff is 1 without `local.fednova`. With `local.fednova`, the Δ_i are normalised, and τ_eff is the
    mean effective number of local steps, weighted like the updates (Wang et al. 2020, arXiv 2007.07481).
    The logged weights include τ_eff.

    Clients send their trained models. So with one client and η_g = 1, the new w is exactly the model
    that the client trained. With `trim`, `local.fednova`, compression or privacy, clients send Δ_i
    instead.
    """

    paper: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    equation: ClassVar[str] = "w ← w + η_g τ_eff Σ_{i∈S} p'_i Δ_i"
    takes_fednova: ClassVar[bool] = True

    assumes_uniform: ClassVar[str] = (
        "the mean of a round is an unbiased estimate of the mean over all clients (Fraboni et al. 2023)"
    )

    sample: int | None = None
    """Number of clients per round; None for all clients."""
    replacement: bool = False
    """Whether clients are drawn with replacement."""
    weights: Literal["renormalised", "unbiased"] = "renormalised"
    """Formula for p'. `renormalised`: p renormalised over the clients of the round. `unbiased`: p N/n,
    if n of N clients are drawn."""
    round_timeout: Annotated[float, "s"] | None = None
    """Maximum duration of a round; None for no limit."""
    server_lr: float = 1.0
    """η_g, the server's step size."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates whose values are removed at each end of every coordinate: the lowest and the
    highest values. This protects against a few attackers. 0: nothing is removed. `median`: only the
    middle one or two values are left (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        positive("server_lr", self.server_lr)
        at_least("sample", self.sample, 1)
        if self.replacement and self.sample is None:
            raise ValueError("replacement needs `sample`, the number of clients that a round draws")
        duration("round_timeout", self.round_timeout)
        check_trim(self.trim, self.sample)

    @property
    def client_side(self) -> ClientSide:
        return ClientSide(as_model=not self.trim)

    def check(self, clients: int) -> None:
        check_trim(self.trim, self.sample or clients)
        if self.sample is not None and not self.replacement and self.sample > clients:
            raise ValueError(
                f"sample is {self.sample}, but there are only {clients} clients to draw from "
                "without replacement"
            )

    @property
    def draws(self) -> bool:
        return self.sample is not None

    def begin(self, server: Server) -> FedAvgState:
        return FedAvgState(self, server)


class FedAvgState(State):
    """The server half: one round after the other."""

    def __init__(self, params: FedAvg, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = RobustSum(server, params.trim) if params.trim else SumOfModels(server)
        """Weight of an update: p_i × the number of times that its client was drawn."""
        self._effective_steps: list[float] = []
        """Effective number of local steps of each update in the sum."""
        self._round: Counter[str] = Counter()
        """Draws of each client for this round, without dropped ones."""
        self._waiting: set[str] = set()
        """Clients of this round whose update has not arrived."""

    def start(self) -> Actions:
        return self._new_round()

    def update(self, update: Update) -> Actions:
        if update.client not in self._waiting or self.server.staleness(update) != 0:
            return [Ignored("late: its round is over")]
        times = self._round[update.client]
        self._sum.add(update, self.server.clients[update.client], times=times)
        self._effective_steps.append(update.effective_steps)
        self._waiting.remove(update.client)
        return self._end_round_if_complete()

    def join(self, client: str) -> Actions:
        return [] if self._waiting else self._new_round()

    def leave(self, client: str) -> Actions:
        return self._drop({client} & self._waiting)

    def timer(self, name: str) -> Actions:
        return self._drop(set(self._waiting))

    def redraw(self) -> Actions:
        return [] if self._waiting else self._new_round()

    def _drop(self, clients: set[str]) -> Actions:
        """The round waits for the updates of all its clients."""
        if not clients:
            return []
        self._waiting -= clients
        for client in clients:
            del self._round[client]
        return self._end_round_if_complete()

    def _end_round_if_complete(self) -> Actions:
        if self._waiting:
            return []
        if not self._sum:  # all clients left: a round without contributions, w is unchanged
            return [Aggregated(self.server.version, ()), *self._new_round()]
        aggregated = self._sum.apply(self._scale())
        self._effective_steps = []
        return [aggregated, *self._new_round()]

    def _scale(self) -> float:
        """Return the factor by which Σ p_i Δ_i is multiplied: η_g τ_eff, times the factor that converts
        p to p'."""
        arrived, total = self._sum.contributions, self._sum.weight
        weighted = zip(arrived, self._effective_steps, strict=True)
        tau_eff = sum(update.weight * steps for update, steps in weighted) / total
        unbiased = self.params.weights == "unbiased"
        # N includes clients that sent an update and then left; otherwise N could be 0.
        population = self.server.clients.keys() | {update.client for update in arrived}
        share = len(population) / self._round.total() if unbiased else 1 / total
        return self.params.server_lr * tau_eff * share

    def _new_round(self) -> Actions:
        clients = list(self.server.clients)
        if not clients:
            return []
        self._round = Counter(self._select(clients))
        self._waiting = set(self._round)
        if not self._waiting:
            return []
        actions: list[Action] = [
            Send(c, deferred=True) for c in self.server.in_device_order(self._waiting)
        ]
        if self.params.round_timeout is not None:
            actions.append(SetTimer("round", from_seconds(self.params.round_timeout)))
        return actions

    def _select(self, clients: list[str]) -> list[str]:
        n, replacement = self.params.sample, self.params.replacement
        if n is None:
            return clients
        if not replacement:
            n = min(n, len(clients))

        def uniformly(rng: np.random.Generator) -> list[str]:
            return [clients[i] for i in rng.choice(len(clients), n, replace=replacement)]

        return self.server.draw(clients, n, uniformly, replacement=replacement)

"""FedAvg, synchronous (McMahan et al. 2017, arXiv 1602.05629)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

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
    """A round sends w to all clients (or to `sample` of them) and waits for all of these:

        w ← w + η_g τ_eff Σ_{i∈S} p'_i Δ_i

    with p' the importance p renormalised over S, multiplicity counted (Wang et al., DeFedAvg,
    (2)-(3), whose printed (3) has the sign of the difference reversed; Fraboni et al. 2023, (3)).
    With non-uniform p and sampling that is biased; `weights: unbiased` uses p'_i = p_i N/n (Fraboni
    et al. 2023, Appendix C). A selected client that goes offline, or is not back within
    `round_timeout` seconds, is dropped from the round; a round that loses all is one in which w stays.
    A client that joins, for the first time or again, takes part from the next round on.

    τ_eff is 1 or, with `local.fednova`, where the Δ_i are normalised, the mean effective number of local
    steps, weighted as the updates are (Wang et al. 2020, arXiv 2007.07481). It is part of the weight
    that is logged.

    Clients send their models, but for `trim`, `local.fednova`, compression and privacy, which need
    Δ_i: with one client and η_g = 1, w is what it trained, to the last bit.
    """

    paper: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    equation: ClassVar[str] = "w ← w + η_g τ_eff Σ_{i∈S} p'_i Δ_i"
    takes_fednova: ClassVar[bool] = True

    sample: int | None = None
    """Clients per round; None selects all."""
    replacement: bool = False
    """Whether `sample` draws with replacement."""
    weights: Literal["renormalised", "unbiased"] = "renormalised"
    round_timeout: Annotated[float, "s"] | None = None
    server_lr: float = 1.0
    """η_g."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates that is left out at each end of every coordinate, so that few attackers
    cannot move it far; or `median` (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        positive("server_lr", self.server_lr)
        at_least("sample", self.sample, 1)
        if self.replacement and self.sample is None:
            raise ValueError("replacement needs `sample`: how many clients a round draws")
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

    def begin(self, server: Server) -> FedAvgState:
        return FedAvgState(self, server)


class FedAvgState(State):
    """One round after the other."""

    def __init__(self, params: FedAvg, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = RobustSum(server, params.trim) if params.trim else SumOfModels(server)
        """With p_i, multiplicity counted, as weight."""
        self._effective_steps: list[float] = []
        """Of the updates in it."""
        self._round: Counter[str] = Counter()
        """How often each client was drawn for this round, without those that were dropped."""
        self._waiting: set[str] = set()

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

    def _drop(self, clients: set[str]) -> Actions:
        """The round goes on without `clients`, of those that it waits for."""
        if not clients:
            return []
        self._waiting -= clients
        for client in clients:
            del self._round[client]
        return self._end_round_if_complete()

    def _end_round_if_complete(self) -> Actions:
        if self._waiting:
            return []
        if not self._sum:  # all left: a round without contributions, in which w stays
            return [Aggregated(self.server.version, ()), *self._new_round()]
        aggregated = self._sum.apply(self._scale())
        self._effective_steps = []
        return [aggregated, *self._new_round()]

    def _scale(self) -> float:
        """What Σ p_i Δ_i is multiplied by: η_g τ_eff, and what makes p' of p."""
        arrived, total = self._sum.contributions, self._sum.weight
        weighted = zip(arrived, self._effective_steps, strict=True)
        tau_eff = sum(update.weight * steps for update, steps in weighted) / total
        unbiased = self.params.weights == "unbiased"
        # N counts who has sent an update and then left: nobody may be left at all.
        population = self.server.clients.keys() | {update.client for update in arrived}
        share = len(population) / self._round.total() if unbiased else 1 / total
        return self.params.server_lr * tau_eff * share

    def _new_round(self) -> Actions:
        clients = list(self.server.clients)
        if not clients:
            return []
        self._round = Counter(self._select(clients))
        self._waiting = set(self._round)
        actions: list[Action] = [Send(c, deferred=True) for c in self.server.in_order(self._waiting)]
        if self.params.round_timeout is not None:
            actions.append(SetTimer("round", from_seconds(self.params.round_timeout)))
        return actions

    def _select(self, clients: list[str]) -> list[str]:
        n = self.params.sample
        if n is None:
            return clients
        if not self.params.replacement:
            n = min(n, len(clients))
        drawn = self.server.rng.choice(len(clients), n, replace=self.params.replacement)
        return [clients[i] for i in drawn]

"""FedAsync (Xie, Koyejo, Gupta 2019, arXiv 1903.03934; Xu et al. 2024, FedFa, (1))."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from agents.checks import at_least, positive
from agents.models.vectors import mix
from agents.rules.interface import Actions, ClientSide, Rule, Send, Server, State, Sums, Update


@dataclass(frozen=True)
class FedAsync(Rule):
    """Apply every update on arrival:

        w ← (1 − β_t) w + β_t w_i,   β_t = η_g · β · s(τ)

    s(τ) is the weight for the staleness τ. `staleness` chooses the formula: `constant` 1; `polynomial`
    (τ+1)^(−a); `hinge` 1 if τ ≤ b, else 1/(a(τ−b)+1). The sender gets the new w. The setting
    `task.local.proximal` adds the paper's optional proximal term (0.005 in the paper).

    A client that joins, for the first time or again, gets w immediately. The rule keeps no state of
    clients that leave.
    """

    paper: ClassVar[str] = "Xie, Koyejo, Gupta 2019, arXiv 1903.03934"
    equation: ClassVar[str] = "w ← (1 − β_t) w + β_t w_i,   β_t = η_g · β · s(τ)"

    mixing: float = 0.6
    """β, the weight of an update that is not stale; above 0 and at most 1."""
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    """s, the discount of stale updates."""
    a: float | None = None
    """Strength of the discount; None for the default, which is 0.5 for `polynomial` and 10 for
    `hinge`."""
    b: float = 4
    """`hinge`: largest staleness that is not discounted."""
    server_lr: float = 1.0
    """η_g, the server's step size. The paper has η_g = 1."""

    def __post_init__(self) -> None:
        if not 0 < self.mixing <= 1:
            raise ValueError(f"mixing is {self.mixing:g}, expected above 0 and at most 1")
        positive("a", self.a)
        at_least("b", self.b, 0)
        positive("server_lr", self.server_lr)

    @property
    def client_side(self) -> ClientSide:
        return ClientSide("model")

    def sums(self) -> Sums:
        raise ValueError("the rule applies every update on arrival")

    def begin(self, server: Server) -> FedAsyncState:
        return FedAsyncState(self, server)

    def discount(self, staleness: int) -> float:
        """Return s(τ), which is in (0, 1]."""
        if self.staleness == "constant":
            return 1.0
        if self.staleness == "polynomial":
            return float((staleness + 1) ** -(0.5 if self.a is None else self.a))
        a = 10 if self.a is None else self.a
        return 1.0 if staleness <= self.b else 1 / (a * (staleness - self.b) + 1)


class FedAsyncState(State):
    """The server half."""

    def __init__(self, params: FedAsync, server: Server) -> None:
        self.params, self.server = params, server

    def update(self, update: Update) -> Actions:
        params = self.params
        share = params.server_lr * params.mixing * params.discount(self.server.staleness(update))
        mix(self.server.w, update.vector, share)
        return [self.server.aggregated([update.contribution(share)]), Send(update.client)]

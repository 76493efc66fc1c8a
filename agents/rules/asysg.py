"""AsySG-con, asynchronous stochastic gradient (Lian, Huang, Li, Liu 2015, arXiv 1506.08272)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from agents.checks import at_least, positive
from agents.rules.interface import Actions, ClientSide, Rule, Send, Server, State, Update
from agents.rules.parts import Trim, check_trim, make_sum


@dataclass(frozen=True)
class AsySG(Rule):
    """Aggregate after every n gradients, regardless of the versions that they were computed at (Lian et
    al., Algorithm 1):

        w ← w − γ (1/n) Σ g_i

    A client sends the gradient of one mini-batch and takes no local step. The client gets the new w
    after the aggregation of its gradient. The paper uses the sum of the gradients (`mean: false`). With
    the mean, γ is comparable to the step sizes of other rules. The logged weight of a gradient is
    positive: γ/n with the mean, γ with the sum.

    A client that joins, for the first time or again, gets w immediately. Gradients of a client that
    leaves still count. If fewer than n clients are left, the aggregation is done when all of them wait
    for it, and n is the number of gradients.
    """

    paper: ClassVar[str] = "Lian, Huang, Li, Liu 2015, arXiv 1506.08272 (AsySG-con)"
    equation: ClassVar[str] = "w ← w − γ (1/n) Σ g_i"

    gradients: int
    """n, number of gradients per aggregation."""
    server_lr: float = 1.0
    """γ, the step size."""
    mean: bool = True
    """Whether the sum of gradients is divided by n."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates whose values are removed at each end of every coordinate: the lowest and the
    highest values. This protects against a few attackers. 0: nothing is removed. `median`: only the
    middle one or two values are left (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        at_least("gradients", self.gradients, 1)
        positive("server_lr", self.server_lr)
        check_trim(self.trim, self.gradients)

    @property
    def client_side(self) -> ClientSide:
        return ClientSide("gradient")

    def check(self, clients: int) -> None:
        if self.gradients > clients:
            raise ValueError(
                f"gradients is {self.gradients}, but only {clients} clients compute at once and "
                f"wait for the aggregation: use at most {clients}"
            )

    def begin(self, server: Server) -> AsySGState:
        return AsySGState(self, server)


class AsySGState(State):
    """The server half. A present client computes a gradient, or waits for the aggregation of its
    gradient."""

    def __init__(self, params: AsySG, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = make_sum(server, params.trim)
        self._waiting: set[str] = set()

    def update(self, update: Update) -> Actions:
        self._sum.add(update)
        self._waiting.add(update.client)
        return self._aggregate_if_ready()

    def leave(self, client: str) -> Actions:
        self._waiting.discard(client)
        return self._aggregate_if_ready()

    def _aggregate_if_ready(self) -> Actions:
        """Aggregate if n gradients arrived, or if every present client waits for the aggregation."""
        nobody_computes = 0 < len(self._waiting) == len(self.server.clients)
        if len(self._sum) < self.params.gradients and not nobody_computes:
            return []
        receivers = self.server.in_device_order(self._waiting)
        self._waiting.clear()
        lr = self.params.server_lr
        aggregated = self._sum.apply(lr / len(self._sum) if self.params.mean else lr, sign=-1)
        return [aggregated, *(Send(client, deferred=True) for client in receivers)]

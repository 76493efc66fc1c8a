"""AsySG-con, asynchronous stochastic gradient (Lian, Huang, Li, Liu 2015, arXiv 1506.08272)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from agents.checks import at_least, positive
from agents.rules.interface import Actions, ClientSide, Rule, Send, Server, State, Update
from agents.rules.parts import Trim, check_trim, gathered


@dataclass(frozen=True)
class AsySG(Rule):
    """At every n gradients, each taken at whatever version its client had (Lian et al., Algorithm 1):

        w ← w − γ (1/n) Σ g_i

    A client sends the gradient of one mini-batch and takes no local step; it gets the new w after the
    aggregation that it contributed to. The paper adds the gradients up (`mean: false`); with the mean,
    γ compares with the step sizes of other rules. The weight that is logged of a gradient is γ/n (or γ),
    without the sign.

    A client that joins, for the first time or again, gets w at once. What a client has handed in counts,
    also if it leaves; where those that left leave too few for n, the aggregation takes what there is.
    """

    paper: ClassVar[str] = "Lian, Huang, Li, Liu 2015, arXiv 1506.08272 (AsySG-con)"
    equation: ClassVar[str] = "w ← w − γ (1/n) Σ g_i"

    gradients: int
    """n."""
    server_lr: float = 1.0
    """γ, the step size."""
    mean: bool = True
    """Whether the sum of gradients is divided by n."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates that is left out at each end of every coordinate, so that few attackers
    cannot move it far; or `median` (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        at_least("gradients", self.gradients, 1)
        positive("server_lr", self.server_lr)
        check_trim(self.trim, self.gradients)

    @property
    def client_side(self) -> ClientSide:
        return ClientSide("gradient")

    @property
    def weight(self) -> float:
        """Of one gradient."""
        return self.server_lr / self.gradients if self.mean else self.server_lr

    def check(self, clients: int) -> None:
        if self.gradients > clients:
            raise ValueError(
                f"gradients is {self.gradients}, but only {clients} clients compute at once and "
                "wait for the aggregation: it would never come"
            )

    def begin(self, server: Server) -> AsySGState:
        return AsySGState(self, server)


class AsySGState(State):
    """A present client computes a gradient, or waits for the aggregation that it contributed to."""

    def __init__(self, params: AsySG, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = gathered(server, params.trim)
        self._waiting: set[str] = set()

    def update(self, update: Update) -> Actions:
        self._sum.add(update)
        self._waiting.add(update.client)
        return self._go_on()

    def leave(self, client: str) -> Actions:
        self._waiting.discard(client)
        return self._go_on()

    def _go_on(self) -> Actions:
        """Clients that left may leave too few for n gradients: aggregate what there is."""
        nobody_computes = 0 < len(self._waiting) == len(self.server.clients)
        if len(self._sum) < self.params.gradients and not nobody_computes:
            return []
        receivers = self.server.in_order(self._waiting)
        self._waiting.clear()
        aggregated = self._sum.apply(self.params.weight, sign=-1)
        return [aggregated, *(Send(client, deferred=True) for client in receivers)]

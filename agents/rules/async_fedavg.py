"""Asynchronous FedAvg (Fraboni, Vidal, Kameni, Lorenzi 2023, arXiv 2206.10189)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from agents.checks import positive
from agents.models.vectors import add_scaled
from agents.rules.interface import Actions, Rule, Send, Server, State, Sums, Update
from agents.rules.parts import check_update_times
from agents.timing.nanoseconds import to_seconds


@dataclass(frozen=True)
class AsyncFedAvg(Rule):
    """Apply every update on arrival (Fraboni et al., 4.3):

        w ← w + η_g d_i Δ_i

    With `weights: identical`, d_i = 1, which favours fast clients. With `weights: time_based`, d_i =
    (Σ_j 1/τ_j) τ_i p_i. p_i is the importance of client i, and τ_j the time that client j takes per
    update. So an update of a client that uploads half as often has twice the weight. The sender gets the
    new w.

    If `update_times` is not set, τ_j is the running mean of client j's round trips, and d_i is 1 until
    every client of the run has sent an update. A client that joins, for the first time or again, gets w
    immediately. If a client leaves, its τ_j is kept, because the client may return.
    """

    paper: ClassVar[str] = "Fraboni, Vidal, Kameni, Lorenzi 2023, arXiv 2206.10189 (section 4.3)"
    equation: ClassVar[str] = "w ← w + η_g d_i Δ_i,   d_i = 1 or (Σ_j 1/τ_j) τ_i p_i"

    weights: Literal["identical", "time_based"] = "identical"
    """Formula for d_i. `identical`: 1. `time_based`: (Σ_j 1/τ_j) τ_i p_i, from the update times of the
    clients."""
    update_times: tuple[Annotated[float, "s"], ...] | None = None
    """Update time τ of every device, in device order; None if the times are estimated during the run."""
    server_lr: float = 1.0
    """η_g, the server's step size."""

    def __post_init__(self) -> None:
        positive("server_lr", self.server_lr)
        if self.update_times is not None and self.weights != "time_based":
            raise ValueError(
                f"update_times has no effect with weights: {self.weights}: remove it, or set "
                "weights: time_based"
            )
        check_update_times(self.update_times)

    def check(self, clients: int) -> None:
        check_update_times(self.update_times, clients)

    def sums(self) -> Sums:
        raise ValueError("the rule applies every update on arrival")

    def begin(self, server: Server) -> AsyncFedAvgState:
        return AsyncFedAvgState(self, server)


class AsyncFedAvgState(State):
    """The server half: applies updates and estimates update times."""

    def __init__(self, params: AsyncFedAvg, server: Server) -> None:
        self.params, self.server = params, server
        times = params.update_times
        self._times = {} if times is None else dict(zip(server.population, times, strict=True))
        """τ_j in seconds, if known."""
        self._round_trips: Counter[str] = Counter()
        """Round trips in the mean."""

    def update(self, update: Update) -> Actions:
        weight = self.params.server_lr
        if self.params.weights == "time_based":
            self._observe(update)
            weight *= self._time_weight(update.client)
        add_scaled(self.server.w, update.vector, weight)
        return [self.server.aggregated([update.contribution(weight)]), Send(update.client)]

    def _observe(self, update: Update) -> None:
        if self.params.update_times is not None or update.round_trip <= 0:
            return
        self._round_trips[update.client] += 1
        mean = self._times.get(update.client, 0.0)
        latest = to_seconds(update.round_trip)
        self._times[update.client] = mean + (latest - mean) / self._round_trips[update.client]

    def _time_weight(self, client: str) -> float:
        """Return d_i of `client`: 1 until every client of the run has an update time."""
        if len(self._times) < len(self.server.population):
            return 1.0
        rate = sum(1 / time for time in self._times.values())
        return rate * self._times[client] * self.server.clients[client]

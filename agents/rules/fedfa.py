"""FedFa (Xu et al. 2024, arXiv 2404.11015)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from agents.checks import at_least, positive
from agents.models.vectors import add_scaled, mix
from agents.rules.interface import (
    Actions,
    ClientSide,
    Contribution,
    Rule,
    Send,
    Server,
    State,
    Sums,
    Update,
)


@dataclass(frozen=True)
class FedFa(Rule):
    """Keep the last K updates in a sliding window S. Aggregate at every arrival, starting with the
    update that fills the window (Xu et al., Algorithm 1, (3)-(4)):

        param:  w ← (1 − η_g) w + η_g (1/K) Σ_{k∈S} w_k
        delta:  w ← w + η_g τ_eff (1/K) Σ_{k∈S} Δ_k

    The sender gets the current w immediately. In the paper, `param` has η_g = 1. τ_eff is 1 without
    `local.fednova`. With `local.fednova`, τ_eff is the mean effective number of local steps over the
    window. The paper combines FedNova only with `delta`, and finds this combination unstable.

    `delta` counts every update K times, so η_g ≈ 1/K matches FedBuff's pace. `delta` diverges if local
    training makes large progress. With η_g = 1, K = 4 and four equally fast clients, the rule diverges
    if local training covers more than about a third of the way to the local optimum.

    The logged weight of an update is the weight in one aggregation: η_g/K, multiplied by τ_eff for
    `delta`. An update is logged once, with the first version that contains it. The server keeps K
    updates in memory.

    A client that joins, for the first time or again, gets w immediately. Updates of a client that leaves
    stay in the window until K further updates have arrived.
    """

    paper: ClassVar[str] = "Xu, Zhang, Di, Liu, Alharthi, Cao 2024, arXiv 2404.11015"
    equation: ClassVar[str] = "w ← (1/K) Σ_{k∈S} w_k   or   w ← w + η_g (1/K) Σ_{k∈S} Δ_k"

    window_size: int
    """K, number of updates in the window."""
    variant: Literal["param", "delta"] = "param"
    """Content of the updates. `param`: clients send models, and w is the mean of the window. `delta`:
    clients send deltas, and the mean of the window is added to w."""
    server_lr: float = 1.0
    """η_g, the server's step size."""

    def __post_init__(self) -> None:
        at_least("window_size", self.window_size, 1)
        positive("server_lr", self.server_lr)

    @property
    def takes_fednova(self) -> bool:  # type: ignore[override]  # only deltas can be normalised
        return self.variant == "delta"

    @property
    def client_side(self) -> ClientSide:
        return ClientSide("model" if self.variant == "param" else "delta")

    def sums(self) -> Sums:
        raise ValueError(
            "consecutive windows differ by two updates, so the difference of their sums reveals updates"
        )

    def begin(self, server: Server) -> FedFaState:
        return FedFaState(self, server)


class FedFaState(State):
    """The server half: the window and its running sum."""

    def __init__(self, params: FedFa, server: Server) -> None:
        self.params, self.server = params, server
        size = params.window_size
        self._window = np.zeros((size, server.w.size), server.w.dtype)
        """Ring buffer, shape (K, d): arrival n is in row n mod K."""
        self._effective_steps = np.ones(size)
        self._sum = np.zeros(
            server.w.size
        )  # float64: rounding errors add up until the sum is recomputed
        self._mean = np.empty_like(server.w)
        self._arrivals = 0
        self._unlisted: list[Contribution] = []
        """Updates in the window that no logged version contains yet."""

    def update(self, update: Update) -> Actions:
        self._put(update)
        if self._arrivals < self.params.window_size:
            return [Send(update.client)]
        tau_eff = float(self._effective_steps.mean()) if self.params.takes_fednova else 1.0
        self._apply(tau_eff)
        used, self._unlisted = self._unlisted, []
        return [self.server.aggregated(used, tau_eff), Send(update.client)]

    def _put(self, update: Update) -> None:
        """Replace the oldest update by `update`. This takes O(d) time, because the running sum is only
        corrected. Once per K arrivals, the sum is recomputed in full."""
        size = self.params.window_size
        row = self._arrivals % size
        add_scaled(self._sum, self._window[row], -1.0)
        np.copyto(self._window[row], update.vector)
        add_scaled(self._sum, self._window[row], 1.0)
        self._effective_steps[row] = update.effective_steps
        self._arrivals += 1
        if self._arrivals % size == 0:
            np.sum(self._window, axis=0, dtype=np.float64, out=self._sum)
        self._unlisted.append(update.contribution(self.params.server_lr / size))

    def _apply(self, tau_eff: float) -> None:
        np.multiply(self._sum, 1 / self.params.window_size, out=self._mean)
        if self.params.variant == "param":
            mix(self.server.w, self._mean, self.params.server_lr)
        else:
            add_scaled(self.server.w, self._mean, self.params.server_lr * tau_eff)

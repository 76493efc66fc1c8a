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
    """A sliding window S holds the last K updates; at every arrival, from the one that fills it on
    (Xu et al., Algorithm 1, (3)-(4)):

        param:  w ← (1 − η_g) w + η_g (1/K) Σ_{k∈S} w_k
        delta:  w ← w + η_g τ_eff (1/K) Σ_{k∈S} Δ_k

    The sender gets the current w at once. The paper's `param` has η_g = 1. τ_eff is 1 or, with
    `local.fednova`, the mean effective number of local steps over the window; the paper combines
    FedNova with `delta` only, and finds it unstable there.

    `delta` counts every update K times, so η_g ≈ 1/K matches FedBuff's pace. It diverges when local
    training goes far: with η_g = 1 and four equally fast clients, K = 4, from about a third of the way
    to the local optimum on.

    The weight that is logged of an update is that of one application: η_g/K, for `delta` times τ_eff.
    It is logged once, with the first version that the update goes into. The server keeps K updates.

    A client that joins, for the first time or again, gets w at once. The updates of who leaves stay in
    the window until K others have come.
    """

    paper: ClassVar[str] = "Xu, Zhang, Di, Liu, Alharthi, Cao 2024, arXiv 2404.11015"
    equation: ClassVar[str] = "w ← (1/K) Σ_{k∈S} w_k   or   w ← w + η_g (1/K) Σ_{k∈S} Δ_k"

    window_size: int
    """K."""
    variant: Literal["param", "delta"] = "param"
    server_lr: float = 1.0
    """η_g."""

    def __post_init__(self) -> None:
        at_least("window_size", self.window_size, 1)
        positive("server_lr", self.server_lr)

    @property
    def takes_fednova(self) -> bool:  # type: ignore[override]  # a normalised model means nothing
        return self.variant == "delta"

    @property
    def client_side(self) -> ClientSide:
        return ClientSide("model" if self.variant == "param" else "delta")

    def sums(self) -> Sums:
        raise ValueError(
            "its windows differ by one update that came and one that went, and so would sums of them"
        )

    def begin(self, server: Server) -> FedFaState:
        return FedFaState(self, server)


class FedFaState(State):
    def __init__(self, params: FedFa, server: Server) -> None:
        self.params, self.server = params, server
        size = params.window_size
        self._window = np.zeros((size, server.w.size), server.w.dtype)
        """A ring: the update of arrival n is in row n mod K."""
        self._effective_steps = np.ones(size)
        self._sum = np.zeros(server.w.size)  # float64: much is added and subtracted before it is renewed
        self._mean = np.empty_like(server.w)
        self._arrivals = 0
        self._unlisted: list[Contribution] = []

    def update(self, update: Update) -> Actions:
        self._put(update)
        if self._arrivals < self.params.window_size:
            return [Send(update.client)]
        tau_eff = float(self._effective_steps.mean()) if self.params.takes_fednova else 1.0
        self._apply(tau_eff)
        used, self._unlisted = self._unlisted, []
        return [self.server.aggregated(used, tau_eff), Send(update.client)]

    def _put(self, update: Update) -> None:
        """The newcomer takes the place of the oldest: O(d), as the whole sum is done once a window."""
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

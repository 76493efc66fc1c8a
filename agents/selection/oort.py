"""Oort (Lai, Zhu, Madhyastha, Chowdhury 2021, OSDI, arXiv 2010.06081)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from agents.checks import at_least
from agents.selection.interface import ClientSelection, ClientView, Draw, ServerView, by_weight

_CAP = 0.95
"""Quantile of the statistical utilities at which they are capped (section 4.4)."""
_MOST_EXCLUDED = 0.3
"""Largest share of the clients that `most_updates` may exclude, as in the authors' code."""


@dataclass(frozen=True)
class Oort(ClientSelection):
    """Clients with useful data and short rounds are preferred (Algorithm 1). Of K places, ε·K go to
    clients that no draw has chosen yet, drawn uniformly. The others go to known clients:

        (1) S_i = |B_i| √(L_i²)                   statistical utility
        (2) U_i = S'_i + √(0.1 ln R / R_i)        temporal uncertainty
        (3) U_i ← U_i · (T/t_i)^α if t_i > T      global system utility

    |B_i| is the number of samples of client i, and L_i its last reported loss, which is a mean over the
    local steps. The paper has the root mean square over the samples, which is at least as large. S' is
    S, capped at its 95 % quantile and scaled to the range from 0 to 1 over the idle known clients, as in
    the authors' code. R is the number of the draw, and R_i that of the last draw that chose client i.
    t_i is the duration of its last round, and T the preferred duration: a percentile of the known
    durations. Clients with at least `cutoff` times the utility of rank (1−ε)K are drawn with
    probabilities proportional to U_i.

    The pacer raises the percentile by `pacer_step` at every W-th draw if the mean of S over the clients
    chosen for their utility was lower in the last W draws than in the W draws before. ε begins at
    `exploration` and is multiplied by `exploration_decay` at each draw, down to `exploration_min`. An
    asynchronous rule often draws a single client. So ε·K is rounded up or down at random, with the right
    mean.

    A client without a usable loss has S' = 0.
    """

    paper: ClassVar[str] = "Lai, Zhu, Madhyastha, Chowdhury 2021, OSDI, arXiv 2010.06081"

    exploration: Annotated[float, "share"] = 0.9
    """ε at the first draw."""
    exploration_decay: Annotated[float, "share"] = 0.98
    """Factor of ε at each draw."""
    exploration_min: Annotated[float, "share"] = 0.2
    """Smallest ε while there are clients that no draw has chosen."""
    alpha: float = 2.0
    """α, exponent of the penalty for slow clients; 0: no penalty."""
    percentile: float = 10.0
    """Percentile of the known durations that T has at first, from 0 to 100; 100: no penalty."""
    pacer_step: float = 5.0
    """Increase of the percentile by the pacer; 0: no pacer."""
    window: int = 20
    """W, number of draws between two decisions of the pacer."""
    cutoff: Annotated[float, "share"] = 0.95
    """Utility that admits a client, as a share of the utility of rank (1−ε)K."""
    most_updates: int | None = None
    """Number of updates after which a client is excluded, against clients that report false losses; at
    most 30 % of the clients are excluded. null: no client is excluded."""

    def __post_init__(self) -> None:
        for name in ("exploration", "exploration_decay", "exploration_min", "cutoff"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} is {value:g}, expected from 0 to 1")
        if self.exploration_min > self.exploration:
            raise ValueError(
                f"exploration_min is {self.exploration_min:g}, but exploration is only "
                f"{self.exploration:g}"
            )
        if not 0 <= self.percentile <= 100:
            raise ValueError(f"percentile is {self.percentile:g}, expected from 0 to 100")
        for name, least in (("alpha", 0), ("pacer_step", 0), ("window", 1), ("most_updates", 1)):
            at_least(name, getattr(self, name), least)

    @property
    def needs_loss(self) -> bool:
        return True

    def eligible(self, idle: Sequence[str], view: ServerView) -> Sequence[str]:
        if self.most_updates is None:
            return idle
        most = self.most_updates
        over = [client for client, seen in view.clients.items() if seen.updates >= most]
        over.sort(key=lambda client: -view.clients[client].updates)
        excluded = set(over[: int(_MOST_EXCLUDED * len(view.clients))])
        return [client for client in idle if client not in excluded]

    def choose(self, draw: Draw, view: ServerView, rng: np.random.Generator) -> Sequence[str]:
        new = [client for client in draw.idle if not view.clients[client].chosen]
        known = [client for client in draw.idle if view.clients[client].chosen]
        explored = self.epsilon(view.draw) * draw.count
        places = int(explored) + int(rng.random() < explored % 1)
        places = min(len(new), max(places, draw.count - len(known)))
        exploited = self._exploit(known, draw.count - places, view, rng)
        self._pace(exploited, view)
        return [*exploited, *by_weight(new, [1.0] * len(new), places, rng)]

    def epsilon(self, draw: int) -> float:
        """Return ε at draw number `draw`."""
        return max(self.exploration_min, self.exploration * self.exploration_decay ** (draw - 1))

    def preferred(self, view: ServerView) -> float:
        """Return T in seconds; infinity if the percentile is 100 or no duration is known."""
        percentile = view.memory.get("percentile", self.percentile)
        known = sorted(seen.duration for seen in view.clients.values() if seen.duration is not None)
        if percentile >= 100 or not known:
            return math.inf
        return known[min(int(len(known) * percentile / 100), len(known) - 1)]

    def utilities(self, known: Sequence[str], view: ServerView) -> dict[str, float]:
        """Return U_i of the clients `known`, which earlier draws have chosen."""
        gained = _scaled({client: statistical_utility(view.clients[client]) for client in known})
        preferred, found = self.preferred(view), {}
        for client, value in gained.items():
            seen = view.clients[client]
            utility = value + math.sqrt(0.1 * math.log(max(view.draw, 1)) / max(seen.last_draw, 1))
            if seen.duration is not None and seen.duration > preferred:
                utility *= (preferred / seen.duration) ** self.alpha
            found[client] = utility
        return found

    def _exploit(
        self, known: Sequence[str], places: int, view: ServerView, rng: np.random.Generator
    ) -> list[str]:
        if places < 1 or not known:
            return []
        utility = self.utilities(known, view)
        ranked = sorted(known, key=lambda client: -utility[client])
        least = self.cutoff * utility[ranked[min(places, len(ranked)) - 1]]
        admitted = [client for client in ranked if utility[client] >= least]
        return by_weight(admitted, [utility[client] for client in admitted], places, rng)

    def _pace(self, exploited: Sequence[str], view: ServerView) -> None:
        """Record the statistical utility of the clients `exploited`, and raise the percentile if it has
        fallen."""
        memory, window = view.memory, self.window
        gained = [statistical_utility(view.clients[client]) for client in exploited]
        history: list[list[float]] = [*memory.get("history", []), [sum(gained), len(gained)]]
        memory["history"] = history = history[-2 * window :]
        if len(history) == 2 * window and view.draw % window == 0:
            before, now = _mean(history[:window]), _mean(history[window:])
            if before > now:
                raised = memory.get("percentile", self.percentile) + self.pacer_step
                memory["percentile"] = min(100.0, raised)


def statistical_utility(seen: ClientView) -> float:
    """Return S_i of (1); 0 if the client has not reported a usable loss."""
    return 0.0 if seen.loss is None else seen.samples * seen.loss


def _scaled(gained: Mapping[str, float]) -> dict[str, float]:
    """Return the values of `gained`, capped at their 95 % quantile and scaled to the range from 0 to
    1."""
    ascending = sorted(gained.values())
    cap, low = ascending[min(int(len(ascending) * _CAP), len(ascending) - 1)], ascending[0]
    if cap <= low:
        return dict.fromkeys(gained, 1.0 if low > 0 else 0.0)
    return {client: (min(value, cap) - low) / (cap - low) for client, value in gained.items()}


def _mean(history: Sequence[Sequence[float]]) -> float:
    count = sum(entry[1] for entry in history)
    return sum(entry[0] for entry in history) / count if count else 0.0

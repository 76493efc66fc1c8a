"""TiFL (Chai, Ali, Zawad, Truex, Anwar, Baracaldo, Zhou, Ludwig, Yan, Cheng 2020, HPDC, arXiv
2001.09249)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from agents.checks import at_least
from agents.selection.interface import ClientSelection, Draw, ServerView, by_weight


@dataclass(frozen=True)
class Tifl(ClientSelection):
    """Clients of similar speed form a tier, and a draw takes its clients from one tier (Algorithm 2), so
    that fast clients do not wait for slow ones:

        (1) tiers: clients in ascending mean duration, cut into m parts of equal size (± 1)
        (2) the tier is t with probability P_t among the tiers that have idle clients and credits left;
            its credits are reduced by 1, and its idle clients are drawn uniformly
        (3) at every I-th draw: if the loss of the tier drawn last has not fallen since the I-th draw
            before, P_t = 2(m + 1 − j_t)/(m(m + 1)), with j_t = 1 for the tier with the highest loss;
            else P stays as it is. At first P_t = 1/m.

    The paper leaves the function in (3) open and only asks that tiers with a lower accuracy get a higher
    probability; ours is linear in the rank. The paper evaluates the model on data of each tier. Here the
    loss of a tier is the mean of the losses that its clients reported last.

    A client that no draw has chosen yet goes first: this is the paper's profiling. A client that was
    chosen and has never answered belongs to the slowest tier. If a tier has too few idle clients for a
    draw, another tier is drawn for the other places. If no tier with idle clients has credits, all
    credits are renewed.
    """

    paper: ClassVar[str] = "Chai et al. 2020, HPDC, arXiv 2001.09249"

    tiers: int = 5
    """m, number of tiers."""
    interval: int | None = 20
    """I, number of draws between two changes of the probabilities; null: they stay equal, and no losses
    are needed."""
    credits: int | None = None
    """Number of draws for which each tier may be used; null: no limit."""

    def __post_init__(self) -> None:
        for name in ("tiers", "interval", "credits"):
            at_least(name, getattr(self, name), 1)

    @property
    def needs_loss(self) -> bool:
        return self.interval is not None

    def check(self, clients: int) -> None:
        if self.tiers > clients:
            raise ValueError(f"tiers is {self.tiers}, but there are only {clients} clients")

    def choose(self, draw: Draw, view: ServerView, rng: np.random.Generator) -> Sequence[str]:
        self._adapt(view)
        new = [client for client in draw.idle if not view.clients[client].chosen]
        chosen = by_weight(new, [1.0] * len(new), draw.count, rng)
        left = set(draw.idle) - {*new}
        idle = [[client for client in tier if client in left] for tier in self.members(view)]
        while len(chosen) < draw.count and any(idle):
            tier = self._draw_tier(idle, view, rng)
            taken = by_weight(idle[tier], [1.0] * len(idle[tier]), draw.count - len(chosen), rng)
            chosen += taken
            idle[tier] = [client for client in idle[tier] if client not in taken]
        return chosen

    def members(self, view: ServerView) -> list[list[str]]:
        """Return the clients of each tier, the fastest tier first. Clients that no draw has chosen
        belong to no tier."""

        def duration(client: str) -> tuple[bool, float]:
            mean = view.clients[client].mean_duration
            return mean is None, mean or 0.0

        known = sorted((client for client, seen in view.clients.items() if seen.chosen), key=duration)
        return [list(part) for part in _parts(known, self.tiers)]

    def _draw_tier(
        self, idle: Sequence[Sequence[str]], view: ServerView, rng: np.random.Generator
    ) -> int:
        """Return the number of a tier with idle clients, drawn by (2)."""
        memory, m = view.memory, self.tiers
        usable = [tier for tier in range(m) if idle[tier]]
        if self.credits is not None:
            left: list[int] = memory.setdefault("credits", [self.credits] * m)
            if not any(left[tier] for tier in usable):
                left[:] = [self.credits] * m
            usable = [tier for tier in usable if left[tier]]
        shares = np.array([self.probabilities(view)[tier] for tier in usable])
        tier = usable[int(rng.choice(len(usable), p=shares / shares.sum()))]
        if self.credits is not None:
            memory["credits"][tier] -= 1
        memory["tier"] = tier
        return tier

    def probabilities(self, view: ServerView) -> list[float]:
        """Return P_t of each tier, the fastest tier first."""
        found: list[float] = view.memory.get("probabilities", [1 / self.tiers] * self.tiers)
        return found

    def _adapt(self, view: ServerView) -> None:
        """Change the probabilities by (3)."""
        if self.interval is None or view.draw % self.interval:
            return
        memory = view.memory
        losses = {
            tier: loss
            for tier, clients in enumerate(self.members(view))
            if (loss := _mean_loss(clients, view)) is not None
        }
        before: Mapping[int, float] = memory.get("losses", {})
        tier = memory.get("tier")
        if tier in before and tier in losses and losses[tier] >= before[tier]:
            memory["probabilities"] = self._by_rank(losses)
        memory["losses"] = losses

    def _by_rank(self, losses: Mapping[int, float]) -> list[float]:
        """Return P_t of (3). A tier without a loss ranks last."""
        m = self.tiers
        ranked = sorted(range(m), key=lambda tier: (tier not in losses, -losses.get(tier, 0.0)))
        found = [0.0] * m
        for place, tier in enumerate(ranked, 1):
            found[tier] = 2 * (m + 1 - place) / (m * (m + 1))
        return found


def _parts(clients: Sequence[str], count: int) -> list[Sequence[str]]:
    """Cut `clients` into `count` parts whose sizes differ by at most 1; the first ones are larger."""
    size, larger = divmod(len(clients), count)
    ends = [size * part + min(part, larger) for part in range(count + 1)]
    return [clients[begin:end] for begin, end in pairwise(ends)]


def _mean_loss(clients: Sequence[str], view: ServerView) -> float | None:
    known = [loss for client in clients if (loss := view.clients[client].loss) is not None]
    return sum(known) / len(known) if known else None

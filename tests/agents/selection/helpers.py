"""What the tests of selections share."""

from __future__ import annotations

from typing import Any

import numpy as np

from agents.selection.draws import Draws
from agents.selection.interface import ClientSelection, ClientView, Draw, ServerView
from agents.timing.nanoseconds import from_seconds

NAMES = "abcdefgh"


def view(**clients: Any) -> ServerView:
    """Return a view at draw number `draw` (1 by default) and device time `at` in seconds (0 by default).
    The other arguments are clients, each with the fields of its `ClientView` that differ from the
    default."""
    draw, at = clients.pop("draw", 1), clients.pop("at", 0.0)
    plain = {"importance": 1 / max(1, len(clients)), "samples": 1}
    return ServerView({name: ClientView(**plain | known) for name, known in clients.items()}, draw, at)


def choose(
    selection: ClientSelection, seen: ServerView, count: int, idle: str = "", seed: int = 0
) -> list[str]:
    """Return the clients that `selection` chooses among `idle`, a string with a letter per client; all
    clients if it is empty."""
    draw = Draw([*(idle or seen.clients)], count)
    return [*selection.choose(draw, seen, np.random.default_rng(seed))]


def make_draws(selection: ClientSelection, clients: int = 4, samples: int = 10) -> Draws:
    names = NAMES[:clients]
    return Draws("mine", selection, dict.fromkeys(names, 1 / clients), dict.fromkeys(names, samples))


def draw(draws: Draws, count: int, idle: str = "abcd", at: float = 0.0, **more: Any) -> list[str]:
    """Draw from `draws` at `at` seconds. The rule's own draw takes the first `count` clients."""
    draws.now = from_seconds(at)
    return draws.draw(
        [*idle], count, lambda _: [*idle][:count], np.random.default_rng(0), 0,
        **{"replacement": False} | more,
    )  # fmt: skip

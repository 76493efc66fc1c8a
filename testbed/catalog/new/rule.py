"""A rule of your own. Its topology is beside it."""

from __future__ import annotations

from dataclasses import dataclass

from agents.checks import at_least
from agents.config import Count, Positive
from agents.rules.interface import Actions, Rule, Send, Server, State, Update
from agents.rules.parts import WeightedSum


@dataclass(frozen=True)
class MyRule(Rule):
    """w ← w + (η/K) Σ Δ_i of K updates. The fields are the parameters that a topology may give."""

    buffer_size: Count = 2  # a whole number from 1 on; agents/config.py has more such types
    server_lr: Positive = 1.0

    def check(self, clients: int) -> None:
        """Refuse parameters with which so many clients cannot work."""
        at_least("buffer_size", self.buffer_size, 1)

    def begin(self, server: Server) -> MyRuleState:
        """The rule in a run: `server` has the model, the clients that are present, and a generator."""
        return MyRuleState(self, server)


class MyRuleState(State):
    """Numbers, texts, lists, dicts, sets, arrays and objects of classes in this file: it is kept in
    checkpoints. No clock, and no random numbers but of server.rng: so the run can be replayed."""

    def __init__(self, params: MyRule, server: Server) -> None:
        self.params, self.server = params, server
        self.buffer = WeightedSum(server)

    def update(self, update: Update) -> Actions:
        """An update has arrived; return what is to be done. `update.vector` is not to be kept, and
        `server.w` is changed in place."""
        self.buffer.add(update)
        reply = Send(
            update.client
        )  # so it begins again at once; agents/rules/interface.py has the others
        if len(self.buffer) < self.params.buffer_size:
            return [reply]
        return [self.buffer.apply(self.params.server_lr / self.params.buffer_size), reply]

    # By default every client gets the model at the start and when it joins, and nothing happens when
    # one leaves: override start, join, leave and timer where your rule differs.

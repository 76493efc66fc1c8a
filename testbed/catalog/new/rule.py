"""Your own aggregation rule. A topology that uses it is in the YAML file with the same name."""

from __future__ import annotations

from dataclasses import dataclass

from agents.checks import at_least
from agents.config import Count, Positive
from agents.rules.interface import Actions, Rule, Send, Server, State, Update
from agents.rules.parts import WeightedSum


@dataclass(frozen=True)
class MyRule(Rule):
    """w ← w + (η/K) Σ Δ_i of K updates. The fields are parameters that a topology can set."""

    buffer_size: Count = 2  # an integer of at least 1; agents/config.py has more such types
    server_lr: Positive = 1.0

    def check(self, clients: int) -> None:
        """Raise an error if the parameters do not work with this number of clients."""
        at_least("buffer_size", self.buffer_size, 1)

    def begin(self, server: Server) -> MyRuleState:
        """Start the rule in a run. `server` has the model, the present clients, and a random
        generator."""
        return MyRuleState(self, server)


class MyRuleState(State):
    """State of the rule, which is saved in checkpoints. So attributes must be numbers, texts, lists,
    dicts, sets, arrays, or objects of classes in this file. Use no clock, and random numbers only from
    server.rng, so that the run can be replayed."""

    def __init__(self, params: MyRule, server: Server) -> None:
        self.params, self.server = params, server
        self.buffer = WeightedSum(server)

    def update(self, update: Update) -> Actions:
        """Handle an update; return the actions to carry out. Do not keep `update.vector`; change
        `server.w` in place."""
        self.buffer.add(update)
        # The client starts its next training at once. agents/rules/interface.py has more actions.
        reply = Send(update.client)
        if len(self.buffer) < self.params.buffer_size:
            return [reply]
        return [self.buffer.apply(self.params.server_lr / self.params.buffer_size), reply]

    # By default every client gets the model at the start and when it joins, and nothing happens when a
    # client leaves. Override start, join, leave and timer if your rule differs. Clients can also send
    # several vectors, remember vectors or change the local objective: see topologies/own/scaffold.py.

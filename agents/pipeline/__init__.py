"""What is done to an update between local training and the aggregation rule: a pipeline of steps.

To add one: a module beside this file (or a folder) with both halves of it, and a row in STEPS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agents.config import Named
from agents.models.vectors import Vector
from agents.pipeline.byzantine import ByzantineStep
from agents.pipeline.compression import CompressionStep
from agents.pipeline.differential import DifferentialRun
from agents.pipeline.interface import ClientContext, ClientStep, ServerStep, UpdateStep
from agents.pipeline.secure.server import SecureSums
from agents.pipeline.secure.step import SecureAggregation
from agents.rules.interface import Contribution
from agents.wire.payloads import UpdateMessage

STEPS: dict[str, type[UpdateStep]] = {
    "byzantine": ByzantineStep,
    "differential": DifferentialRun,
    "compression": CompressionStep,
    "secure": SecureAggregation,
}
"""In the order in which a client does them."""
_NOT_MASKED = "not masked, in a run with secure aggregation"


def sort_steps(steps: Iterable[Named]) -> list[Named]:
    """`steps`, of each kind at most one, in the order in which they are done."""
    return sorted(steps, key=lambda step: [*STEPS].index(step.name))


def build_step(step: Named) -> UpdateStep:
    """The step with its parameters."""
    return STEPS[step.name](**step.params)


def build_client_steps(steps: Iterable[Named], client: ClientContext) -> list[ClientStep]:
    """The halves of `steps` at a client."""
    return [build_step(step).at_client(client) for step in steps]


class ServerSteps:
    """The halves of a run's `steps` at the server, for models with so many parameters."""

    def __init__(self, steps: Iterable[Named], parameters: int) -> None:
        self._steps: list[ServerStep] = []
        self._by_field: dict[str, ServerStep] = {}
        for step in map(build_step, steps):
            if (half := step.at_server(parameters)) is not None:
                self._steps.append(half)
                if step.field is not None:
                    self._by_field[step.field] = half
        sums = [step for step in self._steps if isinstance(step, SecureSums)]
        self.sums = sums[0] if sums else None
        """The step with which the server learns sums only; None: it learns every update."""

    def vector(self, client: str, message: UpdateMessage, base: Vector | None) -> Vector | str:
        """What is known of an update that has passed all other checks, or why it cannot be used; `base`
        is the model that it was trained from, if that is kept."""
        encoded = message.encoded
        if encoded is None:
            return message.vector if self.sums is None else _NOT_MASKED
        step = next((self._by_field[name] for name in encoded.fields if name in self._by_field), None)
        if step is None or self.sums not in (None, step):
            return f"encoded by no step of this run: {', '.join(encoded.fields):.80}"
        return step.receive(client, message, encoded, base)

    def add_noise(self, w: Vector, version: int, used: Sequence[Contribution]) -> None:
        """Add what the steps add to `w` when `version` was made of the updates in `used`."""
        for step in self._steps:
            step.add_noise(w, version, max(one.weight for one in used))

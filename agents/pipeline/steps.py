"""Pipeline of the steps that process an update between local training and the aggregation rule.

To add a step, write a module or a package in this folder with the client half and the server half of the
step, and add a row to STEPS.
"""

from __future__ import annotations

from collections.abc import Iterable

from agents.config import Named
from agents.models.vectors import Vector
from agents.pipeline.byzantine import ByzantineStep
from agents.pipeline.compression import CompressionStep
from agents.pipeline.differential import DifferentialRun
from agents.pipeline.interface import ClientContext, ClientStep, ServerStep, UpdateStep
from agents.secure.step import SecureAggregation
from agents.wire.payloads import Encoded, UpdateMessage

STEPS: dict[str, type[UpdateStep]] = {
    "byzantine": ByzantineStep,
    "differential": DifferentialRun,
    "compression": CompressionStep,
    "secure": SecureAggregation,
}
"""Class of each step, in the order in which a client applies them."""


def sort_steps(steps: Iterable[Named]) -> list[Named]:
    """In the order in which clients apply them, at most one of each kind."""
    return sorted(steps, key=lambda step: [*STEPS].index(step.name))


def build_step(step: Named) -> UpdateStep:
    return STEPS[step.name](**step.params)


def build_client_steps(steps: Iterable[Named], client: ClientContext) -> list[ClientStep]:
    return [build_step(step).at_client(client) for step in steps]


class ServerSteps:
    """Server halves, for models with `parameters` parameters."""

    def __init__(self, steps: Iterable[Named], parameters: int) -> None:
        self.halves: list[ServerStep] = []
        self._by_field: dict[str, ServerStep] = {}
        for step in map(build_step, steps):
            if (half := step.at_server(parameters)) is not None:
                self.halves.append(half)
                if step.field is not None:
                    self._by_field[step.field] = half
        self.sums = next((half for half in self.halves if half.sums_only), None)
        """The half because of which the server learns only sums of updates; None if there is none."""

    def decode(
        self, client: str, message: UpdateMessage, encoded: Encoded, base: Vector | None
    ) -> Vector | str:
        """The update, shape (d,), or the reason to reject it. If the server learns only sums, it is
        `base` for an update of kind `model`, and empty for any other.

        `message`: the rest of the update, which has passed all other checks. `base`: the model that the
        update was trained from, if it is kept.
        """
        step = self._step_of(encoded)
        if step is None or self.sums not in (None, step):
            return f"encoded by a step that this run does not have: {', '.join(encoded.fields):.80}"
        return step.receive(client, message, encoded, base)

    def decode_vector(self, encoded: Encoded, size: int) -> Vector | str:
        """One of the rule's own vectors, shape (size,), or the reason to reject it."""
        step = self._step_of(encoded)
        half = None if step is None else step.for_vector(size)
        if half is None:
            return f"encoded by a step that this run does not have: {', '.join(encoded.fields):.80}"
        try:
            return half.decode(encoded)
        except (LookupError, ValueError) as error:
            return str(error)

    def _step_of(self, encoded: Encoded) -> ServerStep | None:
        return next((self._by_field[name] for name in encoded.fields if name in self._by_field), None)

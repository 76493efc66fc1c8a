"""Validation of updates: what a rule cannot be given, and the run's bounds on the rest. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from agents.aggregator.dispatches import Dispatched
from agents.aggregator.inputs import UpdateArrived
from agents.aggregator.settings import Settings
from agents.models.vectors import Vector, norm, unfit
from agents.pipeline import ServerSteps
from agents.rules.interface import Server
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.payloads import UpdateMessage

MAX_COUNT = 2**63 - 1
"""The largest number that the tables made of the records can hold."""
_MAX_EFFECTIVE_STEPS = 1e12
"""The rule multiplies with them: with vectors of up to 1.8e19 the model stays finite."""
_MAX_LOSS = 3.5e38
"""Of what is finite: NaN says that there is none, infinity that it overflowed."""


class Validation:
    def __init__(self, settings: Settings, server: Server, steps: ServerSteps) -> None:
        self._settings = settings
        self._server = server
        self._steps = steps
        self._kinds = settings.side.kinds
        self._is_bounded = settings.bounds.staleness is not None or settings.bounds.over_norm == "drop"

    def usable(
        self,
        event: UpdateArrived,
        dispatch: Dispatched,
        base: Vector | None,
        begin: Nanoseconds,
        end: Nanoseconds,
    ) -> UpdateMessage | str:
        """The update with its vector, or why the rule cannot be given it. It answers `dispatch`, whose
        model is `base`, if that is kept; `begin` is when that was sent, `end` when the update arrived,
        on the client's clock."""
        message, settings = event.message, self._settings
        if message.kind not in self._kinds:
            return f"kind {message.kind}, the rule takes {settings.side.kind}"
        if message.schema != settings.schema:
            return f"another model: schema {message.schema}, expected {settings.schema}"
        expected, found = self._server.buffers, message.buffers
        if found is not expected and (problem := expected.unfit(found)) is not None:
            return problem
        if message.base_version != dispatch.version:
            return f"base version {message.base_version}, it was sent {dispatch.version}"
        planned = settings.samples.get(event.sender, message.samples)
        if message.samples != planned:
            return f"{message.samples} samples, its shard has {planned}"
        problem = _impossible(message, begin, end)
        if problem is None and self._is_bounded:
            problem = self._too_stale(dispatch)
        if problem is not None:
            return problem
        if message.encoded is None:
            if self._steps.plain_problem is not None:
                return self._steps.plain_problem
        else:
            vector = self._steps.decode(event.sender, message, message.encoded, base)
            if isinstance(vector, str):
                return vector
            message = replace(message, vector=vector)
            if self._steps.sums is not None:  # there is no vector to be judged
                return message
        problem = unfit(message.vector, self._server.w)
        return problem or (self._is_bounded and self._too_long(message)) or message

    def _too_stale(self, dispatch: Dispatched) -> str | None:
        """Why the answer to `dispatch` is dropped, or None."""
        bound, staleness = self._settings.bounds.staleness, self._server.version - dispatch.version
        if bound is None or staleness <= bound:
            return None
        return f"staleness {staleness}, the bound is {bound}"

    def _too_long(self, message: UpdateMessage) -> str | None:
        """Why the update is dropped, or None."""
        bounds = self._settings.bounds
        if bounds.over_norm != "drop" or (length := self.over_norm(message)) is None:
            return None
        return f"norm {length:g}, the bound is {bounds.norm:g}"

    def over_norm(self, message: UpdateMessage) -> float | None:
        """Norm of what the update says the model is to move by, where it is over the bound."""
        bound = self._settings.bounds.norm
        if bound is None:
            return None
        is_model = message.kind == "model"
        length = norm(message.vector - self._server.w if is_model else message.vector)
        return None if length <= bound else length

    def clipped(self, message: UpdateMessage, length: float) -> Vector:
        """The update, of norm `length`, with that of the bound."""
        share, w = (self._settings.bounds.norm or 0.0) / length, self._server.w
        vector = message.vector.astype(w.dtype)
        if message.kind != "model":
            vector *= share
            return vector
        vector -= w
        vector *= share
        vector += w
        return vector


def _impossible(message: UpdateMessage, begin: Nanoseconds, end: Nanoseconds) -> str | None:
    """What no client can have counted, of work between `begin` and `end` on its clock; a rule may divide
    by it, or weight the model with it, and a verdict on the run looks at the times."""
    if max(message.sequence, message.samples, message.steps) > MAX_COUNT:
        return f"a count of more than {MAX_COUNT}"
    trained = begin <= message.downloaded <= message.train_start <= message.train_end <= end
    if not (trained and begin <= message.sent <= end):  # a pull that waited may be older than train_end
        return "times that are not in order, or not between dispatch and arrival"
    if message.samples < 1:
        return f"{message.samples} samples, expected at least 1"
    if message.steps < 0:  # interrupted before its first step, a client has done none
        return f"{message.steps} steps, expected at least 0"
    if not 0 < message.effective_steps <= _MAX_EFFECTIVE_STEPS:
        return f"{message.effective_steps:g} effective steps, expected above 0, at most 1e12"
    if _MAX_LOSS < abs(message.loss) < math.inf:
        return f"a loss of {message.loss:g}, which no float32 is"
    return None

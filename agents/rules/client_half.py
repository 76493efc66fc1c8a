"""The client half of a rule, which converts the result of a local training to an update. This module
contains only vector arithmetic, without I/O or clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agents.config import LocalTraining
from agents.models.vectors import Vector
from agents.wire.payloads import ModelMessage

Kind = Literal["delta", "model", "gradient", "residual"]
"""Content of an update. `delta`: end minus start of the local training, so servers add it. `model`: the
end of the local training. `gradient`: one mini-batch gradient at the start, without a step. `residual`:
the end minus the end that the client sent before (AREA); a client that has sent none yet sends
`model`."""

SavedVectors = Mapping[str, tuple[int, Vector]]
"""Vectors that a client keeps on its disk, by name, each with a sequence or dispatch number."""


@dataclass(frozen=True, slots=True)
class ClientSide:
    """Requirements of a rule on its clients."""

    kind: Kind = "delta"
    as_model: bool = False
    """Whether clients send the trained model in place of a delta, so that no bit is lost by rounding.
    Clients that use FedNova, compression or privacy still send `delta`. Useful for rules in which w is
    unchanged since the client received it, because w can then be replaced by the trained model."""
    send_buffer: Literal["overwrite", "hold"] | None = None
    """Behaviour of a client whose update waits in the send buffer until the server pulls it.
    `overwrite`: train on newer models and replace the update. `hold`: train again only after the update
    was pulled. None if there is no send buffer: an update is sent as soon as it is finished."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of update that the server accepts."""
        either = (
            self.as_model or self.kind == "residual"
        )  # a client without memory has no residual to send
        return (self.kind, "model") if either else (self.kind,)


@dataclass(frozen=True, slots=True)
class Form:
    """Content of an update."""

    kind: Kind
    vector: Callable[[], Vector]
    """Function that computes the vector to send, shape (d,)."""
    effective_steps: float = 1.0
    """FedNova: the effective number of local steps, which the server averages to τ_eff; 1 for a vector
    that is not normalised."""
    memory: SavedVectors | None = None
    """Memory that the client must save before it sends the update; None if the client has nothing
    to save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Arguments from which the client half of a rule is made."""

    local: LocalTraining
    sends_changes: bool = False
    """Whether the steps after the rule (compression, privacy) require the update as a change of the
    model."""
    as_sent: Callable[[int, int, Vector], Vector] | None = None
    """Function that returns the change of the model that the server receives, shape (d,). Its arguments
    are the sequence number, the dispatch, and the change that the client sends. It is set if an update
    may be discarded after its arrival (secure aggregation). None if changes arrive unmodified and are
    never discarded."""
    memory: SavedVectors | None = None
    """Memory that the previous process of this client saved last; None if no memory was saved."""


class ClientState:
    """The client half of a rule during a run; the server half is `agents.rules.interface.State`.

    This default keeps no memory between updates. It sends the trained model, the difference to its start
    or, with FedNova, that difference divided by a_i.
    """

    def __init__(self, side: ClientSide, settings: ClientSettings) -> None:
        self.side = side
        self.local = settings.local
        self._sends_changes = settings.sends_changes

    @property
    def newest(self) -> int:
        """Highest sequence number in memory; 0 if the memory is empty."""
        return 0

    def acknowledge(self, message: ModelMessage) -> None:
        """Handle the information in a dispatch: which update of this client was applied last."""

    def form(self, sequence: int, model: ModelMessage, steps: int, end: Callable[[], Vector]) -> Form:
        """Return the content of update number `sequence`, after `steps` local steps from `model` to
        `end()`, shape (d,)."""
        start, fednova = model.vector, self.local.fednova
        if self.side.kind != "delta":
            return Form(self.side.kind, end)
        if self.side.as_model and not self._sends_changes and not fednova:
            return Form("model", end)
        if not fednova:
            return Form("delta", lambda: end() - start)
        a = effective_steps(self.local, self.local.rate(model.version, model.lr), steps)
        reported_steps = float(steps) if self.local.proximal else a
        return Form("delta", lambda: (end() - start) / np.float32(a or 1.0), reported_steps)

    def goodbye_models(self) -> Sequence[tuple[int, Vector]]:
        """Return the models that the client sends back with its goodbye, each with its sequence number.
        Each of these models may be the last one that the server has applied. The result is empty if the
        rule needs no models."""
        return ()


def effective_steps(local: LocalTraining, lr: float, steps: int) -> float:
    """Return FedNova's a_i (Wang et al. 2020): the progress of `steps` steps in units of a single step.

    Momentum ρ: c ← ρc + 1, a ← a + c. Proximal term μ: a ← (1 − ημ)a + 1; with both, momentum first.
    """
    a = c = 0.0
    shrink = 1 - lr * local.proximal
    for _ in range(steps):
        if local.momentum:
            c = local.momentum * c + 1
            a += c
        if local.proximal:
            a = shrink * a + 1
        elif not local.momentum:
            a += 1
    return a

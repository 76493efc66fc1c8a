"""The half of a rule that runs at a client: which updates it makes of local trainings. Pure vector
arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agents.config import LocalTraining
from agents.models.vectors import Vector
from agents.wire.payloads import ModelMessage

Kind = Literal["delta", "model", "gradient", "residual"]
"""`delta`: end minus start of local training, so servers add. `model`: its end. `gradient`: one
mini-batch gradient at the start, no step taken. `residual`: the end minus the end that the client sent
before (AREA); a client that has sent none sends `model`."""

SavedVectors = Mapping[str, tuple[int, Vector]]
"""What a client keeps on its disk: by name, vectors, each with a sequence or dispatch number."""


@dataclass(frozen=True, slots=True)
class ClientSide:
    """What a rule asks of its clients."""

    kind: Kind = "delta"
    as_model: bool = False
    """A delta comes as the model that it leads to, to the last bit, of all clients that do nothing more
    with it: with FedNova, compression or privacy it comes as `delta`. Of use where w is still the model
    that the client began with, so that it may be put in w's place."""
    send_buffer: Literal["overwrite", "hold"] | None = None
    """None: an update is sent when it is done. Else it waits to be pulled: `overwrite` goes on training
    meanwhile and replaces it, `hold` trains anew only once it was fetched."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What its updates may be."""
        either = self.as_model or self.kind == "residual"  # who has no memory has no residual to send
        return (self.kind, "model") if either else (self.kind,)


@dataclass(frozen=True, slots=True)
class Form:
    """Content of an update."""

    kind: Kind
    vector: Callable[[], Vector]
    effective_steps: float = 1.0
    memory: SavedVectors | None = None
    """Memory that the client must save before it sends the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """What the client half of a rule is made of."""

    local: LocalTraining
    sends_changes: bool = False
    """Whether more is done with an update that is a change of the model: compression, privacy."""
    as_sent: Callable[[int, int, Vector], Vector] | None = None
    """What arrives of the change in the update with this sequence number that answers this dispatch,
    where it may be lost after it has arrived; None: all of it, and it cannot be lost."""
    memory: SavedVectors | None = None
    """What the client's process before has saved last."""


class ClientState:
    """A rule at one client in a run; the server's half is `agents.rules.interface.State`.

    This one keeps nothing from one update to the next: it sends the end of the training, the difference
    to its start or, with FedNova, that difference divided by a_i."""

    def __init__(self, side: ClientSide, settings: ClientSettings) -> None:
        self.side = side
        self.local = settings.local
        self._sends_changes = settings.sends_changes

    @property
    def newest(self) -> int:
        """Highest sequence number in memory; 0 for none."""
        return 0

    def acknowledge(self, message: ModelMessage) -> None:
        """A dispatch says which of the client's updates was applied last."""

    def form(self, sequence: int, model: ModelMessage, steps: int, end: Callable[[], Vector]) -> Form:
        """The form of update `sequence`: `steps` local steps from `model` to `end()`, shape (d,)."""
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

    def farewells(self) -> Sequence[tuple[int, Vector]]:
        """What the client hands in when it says goodbye: each model that may be the last one that was
        applied of it, with its sequence number; nothing, where the rule does not ask for it."""
        return ()


def effective_steps(local: LocalTraining, lr: float, steps: int) -> float:
    """FedNova's a_i (Wang et al. 2020): by how much `steps` steps multiply one step's progress.

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

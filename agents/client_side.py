"""What a rule asks of its clients: all that a device needs of the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["delta", "model", "gradient", "residual"]
"""`delta`: end minus start of local training, so servers add. `model`: its end. `gradient`: one
mini-batch gradient at the start, no step taken. `residual`: the end minus the end that the client sent
before (AREA); a client that has sent none sends `model`."""


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
    debias: Literal["stochastic", "deterministic"] | None = None
    """FAVANO: progress is divided by the steps that the client makes of it as a rule."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What its updates may be."""
        either = self.as_model or self.kind == "residual"  # who has no memory has no residual to send
        return (self.kind, "model") if either else (self.kind,)

"""Settings of the aggregator's core, except the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agents.config import Named, StopConditions, UpdateBounds
from agents.rules.interface import ClientSide
from agents.timing.nanoseconds import Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEvaluation:
    """Settings for the time that a finished run waits for its last evaluation."""

    timeout: float | None = 30.0
    """Maximum waiting time in host seconds; None if there is no limit."""
    dilation: float = 1.0
    """Host seconds per second of device time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the aggregator's core, except the rule."""

    run: str
    schema: str
    """Hash of the model's schema; updates must have the same hash."""
    side: ClientSide
    """The rule's requirements on clients."""
    importance: Mapping[str, float]
    """Importance p_i of every client that trains, in device order."""
    idle: Sequence[str] = ()
    """Clients without a mini-batch. Their presence is recorded, but the rule does not know them."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """Number of training samples of each client. A client's updates must state this number, because a
    rule may use it as a weight. A client without an entry may state any number."""
    stop: StopConditions
    evaluate_every: Nanoseconds
    """Period of the evaluations in ns of device time."""
    checkpoint_every: Nanoseconds | None = None
    """Period in ns of device time with which the model is saved; None if only the first and the
    last model are saved."""
    keeps_models: bool = False
    """Whether models are kept because updates are encoded as differences to them."""
    bounds: UpdateBounds = field(default_factory=UpdateBounds)
    steps: Sequence[Named] = field(default_factory=list)
    """Steps of the clients' update pipelines: one of each kind in the run, in the order of
    `agents.pipeline.STEPS`."""
    silence: Mapping[str, Nanoseconds] = field(default_factory=dict)
    """Time in ns, by client, within which a client must answer a request for a report. After this time
    the client counts as absent. A client without an entry has the default: the time after which the
    broker disconnects it."""
    patience: Mapping[str, float] = field(default_factory=dict)
    """Time in ns, by client, for which a client may be silent even if its rounds so far were shorter.
    The time is infinite if the client's rounds vary at random and their mean is not known. Only clients
    whose time the plan knows have an entry."""
    patient: bool = False
    """Whether the run continues while no client is left."""
    evaluate_after: bool = False
    """Whether models are evaluated after the run. If so, no evaluation is skipped."""
    last_evaluation: LastEvaluation | None = None
    """Settings for waiting for the last evaluation; None if evaluations take no time."""

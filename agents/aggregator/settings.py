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
    """Period of saving the model, in ns of device time; None if only the first and the last model are
    saved."""
    keeps_models: bool = False
    """Whether sent models are kept, because updates are encoded as differences to these models."""
    bounds: UpdateBounds = field(default_factory=UpdateBounds)
    steps: Sequence[Named] = field(default_factory=list)
    """Steps of the clients' update pipelines, in the order of `agents.pipeline.STEPS`. There is at most
    one step of each kind."""
    silence: Mapping[str, Nanoseconds] = field(default_factory=dict)
    """For each client, the time in ns within which it must answer a request for a report. After this
    time the client counts as absent. A client without an entry has the default: the time after which the
    broker disconnects a silent client."""
    patience: Mapping[str, float] = field(default_factory=dict)
    """Nanoseconds for which a client may be silent even if its rounds so far were shorter, by client.
    The time is infinite if the client's rounds vary at random and their mean is not known. Clients
    whose time the plan does not know have no entry."""
    clock_errors: Mapping[str, Nanoseconds] = field(default_factory=dict)
    """For each client on another clock than the aggregator's, the ns by which its times may be wrong."""
    patient: bool = False
    """Whether the run continues while no client is left."""
    evaluate_after: bool = False
    """Whether models are evaluated only after the run. If true, no evaluation is skipped."""
    last_evaluation: LastEvaluation | None = None
    """Settings for waiting for the last evaluation; None if evaluations take no time."""

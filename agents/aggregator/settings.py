"""Settings of the aggregator's core, except the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agents.config import Named, StopConditions, UpdateBounds
from agents.rules.interface import ClientSide
from agents.timing.nanoseconds import Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEvaluation:
    """Waiting of a finished run for its last evaluation."""

    timeout: float | None = 30.0
    """Maximum host seconds; None: without limit."""
    dilation: float = 1.0
    """Host seconds per second of device time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the aggregator's core, except the rule."""

    run: str
    schema: str
    """Hash of the model's schema; updates must have the same one."""
    side: ClientSide
    """The rule's requirements on clients."""
    importance: Mapping[str, float]
    """Importance p_i of every client of the run, in device order."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """Number of training samples of each client. Its updates must state the same number, because a rule
    may use it as a weight. A client without an entry may state any number."""
    stop: StopConditions
    evaluate_every: Nanoseconds
    """Period of the evaluations."""
    checkpoint_every: Nanoseconds | None = None
    """Period in which the model is saved; None: only the first and the last model are saved."""
    keeps_models: bool = False
    """Whether models are kept because updates are encoded as differences to them."""
    bounds: UpdateBounds = field(default_factory=UpdateBounds)
    steps: Sequence[Named] = field(default_factory=list)
    """Steps of the clients' update pipelines: one of each kind in the run, in the order of
    `agents.pipeline.STEPS`."""
    silence: Mapping[str, Nanoseconds] = field(default_factory=dict)
    """Time after which a client that has not answered a request for a report counts as absent, by
    client. A client without an entry has the default: the time after which the broker disconnects it."""
    patience: Mapping[str, float] = field(default_factory=dict)
    """Nanoseconds for which a client may be silent, however long its rounds took, by client for which
    the plan knows it. Infinite if its rounds vary at random and their mean is not known."""
    patient: bool = False
    """Whether the run continues while no client is left."""
    evaluate_after: bool = False
    """Whether models are evaluated after the run; no evaluation is skipped then."""
    last_evaluation: LastEvaluation | None = None
    """Waiting for the last evaluation; None if evaluations take no time."""

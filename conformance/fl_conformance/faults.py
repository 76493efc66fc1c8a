"""Known mistakes of implementations, and which of them explains a difference.

Each mistake is computed: the reference implementation makes it and runs through the same scenario. If it
gives the models that the tested implementation gave, the mistake is a likely cause.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from fl_conformance.adapter import ClientUpdate, Vector
from fl_conformance.reference import Reference
from fl_conformance.scenario import NewVersion, Scenario, UpdateReceived
from fl_conformance.steps import Check, Tolerance, observe

FAULTS: dict[str, str] = {
    "sign": "The sign is reversed: the update is subtracted where it must be added, or added where it "
    "must be subtracted.",
    "divided_by_clients": (
        "The sum is divided by the number of clients, not by the number of updates that the rule "
        "aggregates."
    ),
    "divided_by_contributors": (
        "The sum is divided by the number of clients in the buffer. A client with two updates in "
        "it must count twice."
    ),
    "not_divided": "The sum of the updates is applied. It must be divided by their number.",
    "divided_twice": "The sum is divided by the number of updates twice.",
    "base_current": (
        "The difference is taken to the present model. It must be taken to the model that the "
        "client started from."
    ),
    "base_previous": (
        "The difference is taken to the version before the one that the client started from."
    ),
    "base_first": "The difference is taken to the first model. It must be taken to the model that the "
    "client started from.",
    "model_as_delta": "A trained model is taken for a delta: the whole model is added.",
    "delta_as_model": "A delta is taken for a model: it replaces the model, or is mixed with it.",
    "staleness_plus_one": (
        "The staleness is one too high. It is the present version minus the version that the "
        "client started from, before the update is applied."
    ),
    "staleness_minus_one": (
        "The staleness is one too low, or the discount lacks the 1 of 1+τ. The staleness is the "
        "present version minus the version that the client started from."
    ),
    "hinge_without_one": "The hinge lacks the 1: 1/(a(τ−b)) instead of 1/(a(τ−b)+1).",
    "staleness_ignored": (
        "Stale updates are not discounted: the staleness is always 0, as if the version was "
        "stamped on the update when it arrives."
    ),
    "staleness_at_upload": (
        "The staleness is stamped at the upload. The versions that are made while the update is "
        "on its way must count."
    ),
    "staleness_inverted": "Stale updates get more weight: the discount is inverted.",
    "weights_not_normalised": "The weights are not normalised: they must sum to 1.",
    "weights_normalised": "The weights are normalised to sum 1. The rule divides by a fixed number.",
    "weights_renormalised": (
        "The weights are renormalised over the selected clients; `unbiased` weights are p_i N/n."
    ),
    "importance_ignored": "The importance p_i of the clients is ignored: all count alike.",
    "samples_as_importance": (
        "Clients are weighted by their samples. The scenario gives their importance p_i."
    ),
    "samples_ignored": "The numbers of samples are ignored.",
    "buffer_not_cleared": (
        "The buffer is not cleared after an aggregation: its updates are applied again."
    ),
    "window_emptied": "The window is emptied after an aggregation. It must slide.",
    "window_not_full": "The rule aggregates before the window is full.",
    "one_too_early": "The rule aggregates one update too early.",
    "one_too_late": "The rule aggregates one update too late.",
    "mixing_not_reset": (
        "The mixing weight is never reset: each discount is multiplied into the next weights."
    ),
    "model_replaced": (
        "The trained model replaces the global model. It must be mixed in with the weight β_t."
    ),
    "shares_swapped": "The weights of the global and of the trained model are swapped.",
    "server_lr_ignored": "The server's step size (`server_lr`) is ignored.",
    "time_weights_ignored": "The weights for the clients' update times are missing.",
    "last_round_trip": "The update time is the last round trip. It must be the mean of all.",
    "tick_before_arrivals": "Updates that arrive at the instant of a tick count only in the next tick.",
    "multiplicity_ignored": "A client that is drawn several times counts once.",
    "counted_twice": "Two updates of one client count in the same round.",
    "second_dropped": "A second update of a client is dropped. It must wait for the next round.",
    "late_applied": "An update that is late for its round is applied.",
    "leaver_counted": "A selected client that has left still counts in the divisor.",
    "departed_applied": "An update of a client that has left is applied.",
    "duplicate_applied": "An update that arrives twice is applied twice.",
    "buffer_lost_on_leave": "Updates in the buffer are discarded when their client leaves.",
    "goodbye_ignored": "The model of a client that says goodbye is not taken out of the mean.",
    "joiner_not_counted": "A client that joins is not counted in the mean before its first message.",
    "residual_of_base": (
        "The message is the difference to the received model. It must be the difference to the "
        "end of the client's previous training."
    ),
    "rest_dropped": "The rest of u is dropped after an aggregation with a step below 1.",
    "tau_eff_ignored": "FedNova: the aggregate is not multiplied by the effective number of steps.",
    "mean_for_sum": "The sum and the mean of the gradients are exchanged (`mean`).",
    "not_debiased": "The clients' results are not divided by their number of steps α_i.",
    "server_not_counted": "The server's own model is missing in the mean of s + 1 models.",
    "similarity_ignored": "The direction of stale updates is ignored: the cosine is always 1.",
    "base_two_ago": (
        "The cosine is taken to the model of two versions ago, as in Plato. It must be taken to "
        "the model that the client started from."
    ),
    "stale_not_awaited": (
        "The rule aggregates while a client trains from a model older than the staleness bound."
    ),
    "sent_after_aggregation": (
        "The sender gets the new model. It must get the model from before the aggregation of its update."
    ),
    "one_version_behind": "The model lags one version behind.",
    "never_updated": "The model never changes.",
}
"""Name in the reference implementation -> cause for the user."""

Cause = frozenset[str]
"""Mistakes that together explain a difference."""


@dataclass(frozen=True)
class Explanation:
    cause: Cause
    matched: int
    """Leading checks that the mistakes reproduce."""


def explain(
    scenario: Scenario, observed: Sequence[Vector], first: int, tolerance: Tolerance
) -> list[Explanation]:
    """Return the mistakes that reproduce the models `observed` at least up to check number `first`, the
    first one that differs. The best come first; pairs of mistakes are tried only if no single mistake is
    enough."""
    effective = []
    found: list[Explanation] = []
    expected = _outcome(scenario, ())
    for name in FAULTS:
        outcome = _outcome(scenario, (name,))
        if outcome is None or expected is None:
            continue
        if _matched(expected, outcome, tolerance) < len(expected):
            effective.append(name)
        matched = _matched(observed, outcome, tolerance)
        if matched > first:
            found.append(Explanation(frozenset({name}), matched))
    if not found:
        for pair in combinations(effective, 2):
            outcome = _outcome(scenario, pair)
            matched = 0 if outcome is None else _matched(observed, outcome, tolerance)
            if matched > first:
                found.append(Explanation(frozenset(pair), matched))
    best = max((one.matched for one in found), default=0)
    return [one for one in found if one.matched == best]


def _outcome(scenario: Scenario, faults: Collection[str]) -> list[Vector] | None:
    """None if the models cannot be computed."""
    try:
        with np.errstate(all="ignore"):
            steps = observe(Reference(faults), scenario)
            outcome = [step for step in steps if not isinstance(step, str)]
    except (ArithmeticError, LookupError, ValueError):
        return None
    return outcome if all(np.isfinite(model).all() for model in outcome) else None


def _matched(one: Sequence[Vector], other: Sequence[Vector], tolerance: Tolerance) -> int:
    """Leading checks at which both have the same model."""
    pairs = list(zip(one, other, strict=False))  # `one` is shorter if the adapter failed
    return next((n for n, pair in enumerate(pairs) if not tolerance.equal(*pair)), len(pairs))


def fit(scenario: Scenario, check: Check, found: Vector) -> str | None:
    """Weights of the updates that give the model `found` in place of the one that `check` expects; None
    if no weights give it, or if too many updates arrived since the last version."""
    before, arrived = scenario.setting.model, list[ClientUpdate]()
    for event in scenario.events[: check.event]:
        if isinstance(event, NewVersion):
            before, arrived = event.model, []
        elif isinstance(event, UpdateReceived):
            arrived.append(event.update)
    columns = [update.vector for update in arrived]
    names = [f"{update.client}{update.dispatch}" for update in arrived]
    is_model = bool(arrived) and arrived[0].kind == "model"
    if is_model:
        columns, names = [before, *columns], ["the last model", *names]
    if not arrived or len(columns) >= len(found):
        return None
    target = found if is_model else found - before
    weights, *_ = np.linalg.lstsq(np.array(columns).T, target, rcond=None)
    if np.abs(np.array(columns).T @ weights - target).max() > 1e-6:
        return None
    parts = [f"{weight:.6g}·{name}" for weight, name in zip(weights, names, strict=True)]
    return " + ".join(parts if is_model else ["the last model", *parts])

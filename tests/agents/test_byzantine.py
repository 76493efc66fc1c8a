"""Attacks: what a client makes of its honest training, through the real client core and in a run."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agents.client import core
from agents.config import LocalTraining, Named
from agents.pipeline.byzantine import ATTACKS, Attacker, Noise
from agents.rules.interface import ClientSide, Kind
from agents.wire.payloads import ModelMessage, UpdateMessage
from testbed import simulate
from tests.agents.helpers import client_rule

START, ENDS = [1.0, 1.0], [[3.0, 0.0], [2.0, 2.0]]
"""Messages for one model and two trainings with the honest progress (2, -1), then (1, 1)."""


def sent(named: Named, kind: Kind = "delta", **local: Any) -> list[UpdateMessage]:
    """The client's two updates."""
    rule = client_rule(ClientSide(kind), LocalTraining(steps=2, **local))
    attacker = Attacker(ATTACKS[named.name](**named.params), np.random.default_rng)
    client = core.ClientCore(core.ClientIdentity("run", "a", 10), lambda *_: 0, rule, [attacker])
    model = ModelMessage(
        run="run", version=0, dispatch=1, schema="s", vector=np.array(START, np.float32)
    )
    updates = []
    for dispatch, end in enumerate(ENDS, start=1):
        client.on_model(replace(model, dispatch=dispatch), 0)
        outcome = core.Outcome(np.array(end, np.float32), 0.25)
        client.on_trained(core.Trained(lambda o=outcome: o, 2, 0, 1))  # type: ignore[misc]
        updates += [a.message() for a in client.on_thought(2) if isinstance(a, core.SendUpdate)]
    return updates


@pytest.mark.parametrize(
    ("named", "kind", "first", "second"),
    [
        (Named("sign_flip", {}), "delta", [-2.0, 1.0], [-1.0, -1.0]),
        (Named("sign_flip", {"factor": 3.0}), "delta", [-6.0, 3.0], [-3.0, -3.0]),
        (Named("sign_flip", {}), "model", [-1.0, 2.0], [0.0, 0.0]),  # start + forged progress
        (Named("sign_flip", {}), "gradient", [-3.0, 0.0], [-2.0, -2.0]),
        (Named("scale", {"factor": 4.0}), "delta", [8.0, -4.0], [4.0, 4.0]),
        (Named("stale_replay", {}), "delta", [2.0, -1.0], [2.0, -1.0]),
        (Named("stale_replay", {}), "model", [3.0, 0.0], [3.0, 0.0]),
    ],
)
def test_attacks_by_hand(named: Named, kind: Kind, first: list[float], second: list[float]) -> None:
    updates = sent(named, kind)
    assert [update.vector.tolist() for update in updates] == [first, second]
    assert {(update.loss, update.steps, update.kind) for update in updates} == {(0.25, 2, kind)}


def test_attack_noise_differs_per_update_and_is_reproducible() -> None:
    honest = [[2.0, -1.0], [1.0, 1.0]]
    one, two = (
        [u.vector - h for u, h in zip(sent(Named("noise", {"std": 0.5})), honest, strict=True)]
        for _ in range(2)
    )
    assert np.array(one).tolist() == np.array(two).tolist()
    assert (one[0] != one[1]).all()
    attack = Noise(std=0.5)
    zeros = np.zeros(100_000, np.float32)
    noise = attack.forge(zeros, zeros, lambda: np.random.default_rng(0))
    assert noise.dtype == np.float32
    assert (noise.mean(), noise.std()) == pytest.approx((0, 0.5), abs=0.01)


def test_attack_is_applied_before_fednova() -> None:
    """FedNova divides what is sent by the number of steps: the forged progress, too."""
    (first, _) = sent(Named("sign_flip", {}), fednova=True)
    assert first.vector.tolist() == [-1.0, 0.5]


FLEET = """
name: t
seed: 3
task: {name: digits-logreg, local: {steps: 10, batch_size: 32, lr: 0.1}}
rule: {name: fedbuff, buffer_size: 10}
devices:
  - {name: good, count: 8, timing: {distribution: exponential, mean: 1s}}
  - {name: bad, count: 2, timing: {distribution: exponential, mean: 1s}, byzantine: ATTACK}
evaluate: {every: 10s}
stop: {after: 60s}
runtime: {name: virtual}
"""


def accuracy(attack: str, **changes: Any) -> tuple[float, Any]:
    """Return the accuracy of the last model, and the run."""
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(FLEET.replace("ATTACK", attack), runs=folder, **changes)
    return float(run.evaluations["accuracy"].iloc[-1]), run


def test_two_of_ten_attackers_ruin_the_mean_but_not_median_or_trimmed_mean() -> None:
    flip = "{kind: sign_flip, factor: 5.0}"
    assert accuracy(flip)[0] < 0.3
    for trim in ("median", 0.3):
        assert accuracy(flip, rule={"name": "fedbuff", "buffer_size": 10, "trim": trim})[0] > 0.85


def test_norm_bounds_limit_attackers_and_are_recorded() -> None:
    flip = "{kind: sign_flip, factor: 5.0}"
    clipped, run = accuracy(flip, bounds={"norm": 1.0})
    assert clipped > 0.6
    assert set(run.clipped["client"]) >= {"bad-1", "bad-2"}
    assert (run.clipped["norm"] > 1.0).all()
    dropped, run = accuracy(flip, bounds={"norm": 1.0, "over_norm": "drop"})
    assert dropped > 0.85
    reasons = run.rejected.groupby("client", observed=True)["reason"].first()
    assert reasons["bad-1"].startswith("norm ")
    assert reasons["bad-1"].endswith(", expected at most 1")


def test_update_of_3e38_does_not_stop_the_run() -> None:
    learned, run = accuracy("{kind: scale, factor: 3.0e+38}")
    assert learned > 0.85
    assert set(run.updates["client"]) == {f"good-{k}" for k in range(1, 9)}
    reasons = run.rejected.groupby("client", observed=True)["reason"].unique()
    assert "diverged" in reasons["bad-1"][0]

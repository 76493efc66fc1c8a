"""Limits of each rule on quadratics in closed form, with real cores in float64. Client i minimises ½ h_i
(w − c_i)²: local training covers the fraction φ_i = 1 − (1 − η h_i)^K of the way to c_i."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest

from agents import events
from agents.config import StopConditions
from agents.rules.area import Area
from agents.rules.as_fedavg import AsFedAvg
from agents.rules.async_fedavg import AsyncFedAvg
from agents.rules.asysg import AsySG
from agents.rules.defedavg_iid import DeFedAvgIid
from agents.rules.defedavg_niid import DeFedAvgNiid
from agents.rules.favano import Favano
from agents.rules.fedasync import FedAsync
from agents.rules.fedavg import FedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.fedfa import FedFa
from agents.rules.fedfix import FedFix
from agents.rules.interface import Rule
from agents.rules.port import Port
from tests.agents.helpers import Simulation


def simulate(
    rule: Rule, centers: Sequence[float], periods: Sequence[float], lr: float, **more: Any
) -> Simulation:
    """A run of 400 updates, if nothing else is said."""
    stop = more.pop("stop", StopConditions(updates=400))
    simulation = Simulation(rule, centers, periods, lr, stop, dtype=np.float64, **more)
    simulation.run()
    return simulation


# Equal rates


@pytest.mark.parametrize(
    ("rule", "phi"),
    [
        (FedAvg(), 0.4),
        (FedFix(period=1.0), 0.4),
        (FedFix(period=1.5), 0.4),  # Δt ≥ max τ
        (FedBuff(buffer_size=4, reply="after_aggregation"), 0.4),
        (DeFedAvgIid(buffer_size=4), 0.4),
        (Port(min_updates=4), 0.4),  # equal staleness and samples: equal weights
        (AsySG(gradients=4, server_lr=0.4), 1.0),
        (AsySG(gradients=4, server_lr=0.1, mean=False), 1.0),
        (Favano(period=2.0, sample=4), 0.5),  # w stays a fifth of the mean: 4/5 · 0.5
    ],
    ids=repr,
)
@pytest.mark.parametrize("centers", [(3, 3, 3, 3), (0, 1, 5, 6)])
def test_equal_clients_give_the_sequence_of_fedavg(
    rule: Rule, phi: float, centers: tuple[float, ...]
) -> None:
    """w ← w + 0.4 (3 − w), the sequence of synchronous FedAvg."""
    models = simulate(rule, centers, [1.0] * 4, phi).models
    assert models[:4] == pytest.approx([0, 1.2, 1.92, 2.352], abs=1e-14)
    assert models[-1] == pytest.approx(3, abs=1e-14)


@pytest.mark.parametrize(
    "rule", [AsFedAvg(every=4), Area(every=4), Area(criterion="period", period=1.0)], ids=repr
)
def test_reply_before_the_aggregation_splits_the_sequence_in_two(rule: Rule) -> None:
    models = simulate(rule, (0, 1, 5, 6), [1.0] * 4, 0.4).models
    assert models[:7] == pytest.approx([0, 1.2, 1.2, 1.92, 1.92, 2.352, 2.352], abs=1e-14)
    assert models[-1] == pytest.approx(3, abs=1e-10)


def test_fedbuff_with_immediate_replies_trains_from_the_model_before() -> None:
    """All clients but the last of a buffer: w_2 = 1.2 + 0.4 (3 − (0 + 0 + 0 + 1.2)/4), and so on."""
    models = simulate(FedBuff(buffer_size=4), (0, 1, 5, 6), [1.0] * 4, 0.4).models
    assert models[:4] == pytest.approx([0, 1.2, 2.28, 2.892], abs=1e-14)
    assert models[-1] == pytest.approx(3, abs=1e-14)


def test_fedfa_param_moves_towards_the_mean_at_every_arrival() -> None:
    """The window fills with φ·3 = 1.2 each; the second round trains from 0 but for the last client,
    which got 1.2: from 1.2 it makes 1.92, and so on."""
    models = simulate(FedFa(window_size=4), (0, 1, 5, 6), [1.0] * 4, 0.4).models
    assert models[:5] == pytest.approx([0, 1.2, 1.2, 1.2, 1.2], abs=1e-14)
    # (3·1.2 + 1.92)/4, (2·1.2 + 2·1.92)/4, …, (3·1.92 + 1.38 + 0.4·1.62)/4
    assert models[5:10] == pytest.approx([1.38, 1.56, 1.74, 1.92, 1.947], abs=1e-14)
    assert models[-1] == pytest.approx(3, abs=1e-14)


@pytest.mark.parametrize(("phi", "diverges"), [(0.330, False), (0.336, True)])
def test_fedfa_delta_diverges_at_its_critical_step(phi: float, diverges: bool) -> None:
    """Four clients in turn, K = 4: e_n = e_{n−1} − φ/4 Σ_{j=4..7} e_{n−j}. With z = e^{iθ} that is
    z⁵ = iφ sin 2θ / (8 sin² θ/2), so θ = π/10 and φ = 8 sin² 9° / sin 36° = 0.33307."""
    rule = FedFa(window_size=4, variant="delta")
    errors = np.abs(
        np.array(simulate(rule, [3] * 4, [1.0] * 4, phi, stop=StopConditions(updates=1500)).models) - 3
    )
    assert (errors[-200:].max() > 1.5 * errors[400:600].max()) == diverges
    assert (errors[-200:].max() < errors[400:600].max() / 1.5) == (not diverges)


# Two clients in turn: the first uploads at 2, 4, 6, …, the second at 3, 5, 7, …


def alternate(rule: Rule, curvatures: tuple[float, float]) -> list[float]:
    """The last model after the first client and the last after the second; centers 1 and 5, η = 0.3."""
    simulation = simulate(rule, (1, 5), (2.0, 2.0), 0.3, curvatures=curvatures, joins=(0.0, 1.0))
    return simulation.models[-2:]


@pytest.mark.parametrize(
    "rule",
    [
        AsyncFedAvg(),
        FedBuff(buffer_size=1),
        FedFa(window_size=1, variant="delta"),
        Port(min_updates=1),
        AsySG(gradients=1, server_lr=0.3),
        FedAsync(mixing=0.5, staleness="constant"),  # as a delta rule with β/(1−β) = 1
    ],
    ids=repr,
)
def test_limit_of_two_alternating_clients_trained_from_their_own_reply(rule: Rule) -> None:
    """A = 0.3, B = 0.6: (A(1+B)·1 + B·5)/(A+B+AB) and (A·1 + B(1+A)·5)/(A+B+AB)."""
    assert alternate(rule, (1, 2)) == pytest.approx([3.48 / 1.08, 4.2 / 1.08], abs=1e-14)


def test_limit_of_two_alternating_clients_with_unequal_weights() -> None:
    """d = (1 + 1/3)·τ/2 = 2/3 and 2 make A = 0.2 and B = 0.6 (Fraboni et al., Example 2)."""
    rule = AsyncFedAvg(weights="time_based", update_times=(1.0, 3.0))
    assert alternate(rule, (1, 1)) == pytest.approx([3.32 / 0.92, 3.8 / 0.92], abs=1e-14)


@pytest.mark.parametrize("rule", [DeFedAvgIid(buffer_size=1), AsFedAvg(every=1)], ids=repr)
def test_limit_of_two_alternating_clients_trained_from_the_others_model(rule: Rule) -> None:
    """A = 0.3, B = 0.6: (A·1 + B(1−A)·5)/(A+B−AB) and (A(1−B)·1 + B·5)/(A+B−AB)."""
    assert alternate(rule, (1, 2)) == pytest.approx([2.4 / 0.72, 3.12 / 0.72], abs=1e-12)


def test_limit_of_two_alternating_clients_in_a_window_of_two() -> None:
    """FedFa's mean holds one model of each: no cycle, (A·1 + B·5)/(A+B)."""
    assert alternate(FedFa(window_size=2), (1, 2)) == pytest.approx([3.3 / 0.9] * 2, abs=1e-14)


# Unequal rates

CENTERS = {"a": 0.0, "b": 1.0, "c": 3.0, "d": 8.0}
"""Their plain mean is 3; weighted by the rates 20, 5, 2, 1 it is 19/28 = 0.679."""
PERIODS = (1 / 20, 1 / 5, 1 / 2, 1.0)


@pytest.mark.parametrize(
    ("rule", "lr", "limit"),
    [
        (AsyncFedAvg(), 0.02, 0.679),
        (AsyncFedAvg(weights="time_based"), 0.01, 3),
        (AsyncFedAvg(weights="time_based", update_times=PERIODS), 0.01, 3),
        (FedFix(period=0.15), 0.04, 3),
        (FedFix(period=0.15, update_times=PERIODS), 0.04, 3),
        (FedBuff(buffer_size=6), 0.05, 0.679),
        (FedBuff(buffer_size=6, staleness="inverse_sqrt"), 0.05, 0.43),
        (FedBuff(buffer_size=3, reply="after_aggregation"), 0.05, None),
        (FedAsync(staleness="constant"), 0.02, 0.679),
        (FedFa(window_size=4), 0.02, 0.679),
        (FedFa(window_size=4, variant="delta", server_lr=0.25), 0.02, 0.679),
        (AsFedAvg(every=4), 0.05, 0.679),
        (AsySG(gradients=1, server_lr=0.01), 1.0, 0.679),
        (AsySG(gradients=2, server_lr=0.02), 1.0, None),
        (DeFedAvgIid(buffer_size=1), 0.02, 0.679),
        (DeFedAvgIid(buffer_size=2), 0.02, None),
        (Port(min_updates=2, staleness_bound=2), 0.04, None),
    ],
    ids=repr,
)
def test_small_steps_converge_to_the_centers_weighted_by_applied_weights(
    rule: Rule, lr: float, limit: float | None
) -> None:
    """q̃_i, the weights that client i was given in all, over those of all: w heads for Σ q̃_i c_i."""
    simulation = simulate(rule, list(CENTERS.values()), PERIODS, lr, stop=StopConditions(after=50.0))
    applied = [r for r in simulation.records if isinstance(r, events.UpdateApplied) and r.applied > 32]
    weights = {name: sum(r.weight for r in applied if r.client == name) for name in CENTERS}
    heading = sum(weights[name] * center for name, center in CENTERS.items()) / sum(weights.values())
    settled = simulation.models[applied[0].applied_version :]
    assert np.mean(settled) == pytest.approx(heading, abs=0.03)
    assert limit is None or heading == pytest.approx(limit, abs=0.015)


@pytest.mark.parametrize("send_buffer", ["overwrite", "hold"])
def test_defedavg_niid_converges_to_the_plain_mean(send_buffer: Literal["overwrite", "hold"]) -> None:
    """The limit holds up to the random draws; rates 20:1, centers 0 and 6; weighted by the rates it
    would be 0.29."""
    rule = DeFedAvgNiid(sample=4, send_buffer=send_buffer)
    models = simulate(rule, (0, 6), (1 / 20, 1), 0.05, stop=StopConditions(updates=2000)).models
    assert np.mean(models[len(models) // 4 :]) == pytest.approx(3, abs=0.2)


@pytest.mark.parametrize("debias", ["stochastic", "deterministic"])
def test_limit_of_favano_divides_progress_by_steps(
    debias: Literal["stochastic", "deterministic"],
) -> None:
    """20 steps or 1 by the time that both are interrupted: φ/α is (1 − 0.95²⁰)/20 = 0.0320757 or 0.05,
    and (0.0320757·1 + 0.05·5)/0.0820757 = 3.436775."""
    rule = Favano(period=1.0, sample=2, debias=debias)
    models = simulate(rule, (1, 5), (1.0, 20.0), 0.05, steps=20, stop=StopConditions(after=500.0)).models
    assert models[-1] == pytest.approx(3.436775, abs=1e-5)


# AREA: rates 20, 7, 1; importance uniform

AREA_CENTERS, AREA_PERIODS = (1, 5, 6), (1 / 20, 1 / 7, 1.0)

constant_steps = pytest.mark.parametrize(
    "rule",
    [
        Area(lr=0.6, every=3),
        Area(lr=0.6, criterion="period", period=0.3),
        Area(lr=0.6, criterion="random", rate=4.0),
        Area(lr=0.6, criterion="random", rate=4.0, tuned=True),
    ],
    ids=["every", "period", "random", "tuned"],
)


@constant_steps
@pytest.mark.parametrize("steps", [1, 5])
def test_area_converges_to_the_plain_mean_exactly(rule: Area, steps: int) -> None:
    stop = StopConditions(after=50.0)
    models = simulate(rule, AREA_CENTERS, AREA_PERIODS, 0.9, steps=steps, stop=stop).models
    assert models[-1] == pytest.approx(4, abs=1e-13)


@constant_steps
@pytest.mark.parametrize(("steps", "limit"), [(1, 14 / 3.5), (5, 10.98294 / 2.82201)])
def test_limit_of_area_with_unequal_curvatures(rule: Area, steps: int, limit: float) -> None:
    """h = 1, 2, ½. One step: Σ h_i c_i / Σ h_i, the optimum. Five: each goes φ_i of its way, 0.98976,
    1.00032 and 0.83193, and Σ φ_i c_i / Σ φ_i is biased (client drift)."""
    curvatures, stop = (1, 2, 0.5), StopConditions(after=50.0)
    more = {"steps": steps, "curvatures": curvatures, "stop": stop}
    models = simulate(rule, AREA_CENTERS, AREA_PERIODS, 0.9, **more).models
    assert models[-1] == pytest.approx(limit, abs=1e-13)


def test_area_with_decreasing_steps_has_no_drift() -> None:
    """With five steps as above a constant α = 0.2 would end 0.14 off; here the error falls as α, as
    1/k."""
    rule = Area(every=3, step="harmonic", c=8.0, d=20.0)
    more: dict[str, Any] = {"steps": 5, "curvatures": (1, 2, 0.5), "stop": StopConditions(updates=4000)}
    models = simulate(rule, AREA_CENTERS, AREA_PERIODS, 0.9, **more).models
    errors = [abs(np.mean(models[n - 50 : n]) - 4) for n in (325, 650, 1300)]
    assert errors[0] < 0.02
    assert all(later < 0.75 * sooner for sooner, later in pairwise(errors))

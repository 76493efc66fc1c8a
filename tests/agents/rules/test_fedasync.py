"""FedAsync: w ← (1 − β_t) w + β_t w_i with β_t = β·s(τ). Numbers computed by hand."""

from __future__ import annotations

import pytest

from agents.rules.fedasync import FedAsync
from tests.agents.helpers import make_server, sent, update, weights


def test_every_update_is_mixed_in_and_answered_with_the_new_model() -> None:
    server = make_server(0.5, 0.5, w=(1.0, 2.0))
    state = FedAsync(mixing=0.25).begin(server)
    assert sent(state.start()) == ["a", "b"]
    done = state.update(update("b", 5.0, -2.0))
    assert server.w.tolist() == [0.75 * 1 + 0.25 * 5, 0.75 * 2 + 0.25 * -2] == [2.0, 1.0]
    assert weights(done) == [("b", 0.25)]  # whatever its importance
    assert sent(done) == ["b"]
    assert server.version == 1


@pytest.mark.parametrize(
    ("rule", "by_staleness"),
    [
        (FedAsync(staleness="constant"), {0: 1.0, 7: 1.0}),
        (FedAsync(), {0: 1.0, 3: 0.5, 8: 1 / 3}),  # (τ+1)^(−1/2)
        (FedAsync(a=2), {0: 1.0, 1: 0.25, 9: 0.01}),
        (FedAsync(staleness="hinge"), {0: 1.0, 4: 1.0, 5: 1 / 11, 6: 1 / 21}),
        (FedAsync(staleness="hinge", a=0.5, b=0), {0: 1.0, 2: 0.5, 6: 0.25}),
    ],
)
def test_staleness_discount_by_hand(rule: FedAsync, by_staleness: dict[int, float]) -> None:
    found = {staleness: rule.discount(staleness) for staleness in by_staleness}
    assert found == pytest.approx(by_staleness, rel=1e-12)


def test_server_lr_multiplies_the_mixing_weight() -> None:
    server = make_server(1.0)
    FedAsync(server_lr=0.5).begin(server).update(update("a", 10.0))
    assert server.w.tolist() == pytest.approx([3.0])


def test_mixing_weight_of_one_replaces_the_model() -> None:
    server = make_server(1.0, w=(0.1,))
    FedAsync(mixing=1.0).begin(server).update(update("a", 0.3))
    assert server.w.tolist() == [0.3]

"""Parameters that a rule refuses, and those that do not fit the number of clients."""

from __future__ import annotations

from typing import Any

import pytest

from agents.rules import RULES

TIMES = (1.0, 2.0, 4.0)

REFUSED: dict[str, list[dict[str, Any]]] = {
    "as_fedavg": [{"every": 0}, {"server_lr": 0.0, "every": 1}],
    "async_fedavg": [
        {"server_lr": 0.0},
        {"update_times": TIMES},  # of no use to identical weights
        {"update_times": (1.0, 0.0), "weights": "time_based"},
    ],
    "asysg": [{"gradients": 0}, {"server_lr": 0.0, "gradients": 1}],
    "defedavg_iid": [{"buffer_size": 0}, {"server_lr": float("nan"), "buffer_size": 1}],
    "defedavg_niid": [{"sample": 0}, {"server_lr": 0.0, "sample": 1}],
    "favano": [
        {"period": 0.0, "sample": 1},
        {"sample": 0, "period": 1.0},
        {"server_lr": 0.0, "period": 1.0, "sample": 1},
    ],
    "fedasync": [{"mixing": 0.0}, {"mixing": 1.1}, {"a": 0.0}, {"b": -1}, {"server_lr": -1.0}],
    "fedavg": [{"sample": 0}, {"replacement": True}, {"round_timeout": 0.0}, {"server_lr": 0.0}],
    "fedbuff": [{"buffer_size": 0}, {"concurrency": 0}, {"replace": "block"}, {"server_lr": 0.0}],
    "fedfa": [{"window_size": 0}, {"server_lr": 0.0, "window_size": 1}],
    "fedfix": [
        {"period": 0.0},
        {"server_lr": 0.0, "period": 1.0},
        {"update_times": (0.0,), "period": 1.0},
    ],
    "port": [
        *({"min_updates": 0}, {"staleness_bound": 0}, {"concurrency": 0}),
        *({"similarity_weight": -1.0}, {"staleness_weight": 0.0}, {"server_lr": 0.0}),
    ],
}
"""By rule: parameters of which the first is refused."""


@pytest.mark.parametrize(
    ("rule", "parameters"), [(rule, one) for rule, refused in REFUSED.items() for one in refused]
)
def test_invalid_parameters_are_refused(rule: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(parameters))):
        RULES[rule](**parameters)


@pytest.mark.parametrize(
    ("rule", "refused", "fitting", "complaint"),
    [
        ("asysg", {"gradients": 5}, {"gradients": 4}, "only 4 clients"),
        ("defedavg_iid", {"buffer_size": 5}, {"buffer_size": 4}, "only 4 clients"),
        ("favano", {"period": 1.0, "sample": 5}, {"period": 1.0, "sample": 4}, "only 4 clients"),
        ("fedavg", {"sample": 5}, {"sample": 5, "replacement": True}, "only 4 clients"),
        ("fedbuff", {"concurrency": 5}, {"concurrency": 4}, "only 4 clients"),
        (
            "fedbuff",
            {"buffer_size": 5, "reply": "after_aggregation"},
            {"buffer_size": 5},
            "never fill",
        ),
        (
            "fedbuff",
            {"buffer_size": 4, "concurrency": 3, "replace": "block"},
            {"buffer_size": 3, "concurrency": 3, "replace": "block"},
            "never fill",
        ),
        ("port", {"min_updates": 2, "concurrency": 5}, {"min_updates": 2, "concurrency": 4}, "clients"),
        ("port", {"min_updates": 5}, {"min_updates": 4, "concurrency": 4}, "clients"),
        ("port", {"min_updates": 3, "concurrency": 2}, {"min_updates": 3, "concurrency": 3}, "clients"),
    ],
)
def test_rule_that_needs_more_than_four_clients_is_refused(
    rule: str, refused: dict[str, Any], fitting: dict[str, Any], complaint: str
) -> None:
    RULES[rule](**fitting).check(4)
    with pytest.raises(ValueError, match=complaint):
        RULES[rule](**refused).check(4)


@pytest.mark.parametrize(
    ("rule", "parameters"), [("async_fedavg", {"weights": "time_based"}), ("fedfix", {"period": 1.0})]
)
def test_update_times_need_one_value_per_device(rule: str, parameters: dict[str, Any]) -> None:
    made = RULES[rule](**parameters | {"update_times": TIMES})
    made.check(3)
    with pytest.raises(ValueError, match="3 entries, expected 4"):
        made.check(4)

"""The aggregation rules. To add one: a module beside this file, and a line in RULES."""

from __future__ import annotations

from agents.rules.fedasync import FedAsync
from agents.rules.fedavg import FedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Rule

RULES: dict[str, type[Rule]] = {
    "fedasync": FedAsync,
    "fedavg": FedAvg,
    "fedbuff": FedBuff,
}

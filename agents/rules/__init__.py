"""The aggregation rules. To add one: a module beside this file, and a line in RULES."""

from __future__ import annotations

from agents.rules.as_fedavg import AsFedAvg
from agents.rules.async_fedavg import AsyncFedAvg
from agents.rules.asysg import AsySG
from agents.rules.fedasync import FedAsync
from agents.rules.fedavg import FedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.fedfa import FedFa
from agents.rules.fedfix import FedFix
from agents.rules.interface import Rule

RULES: dict[str, type[Rule]] = {
    "as_fedavg": AsFedAvg,
    "async_fedavg": AsyncFedAvg,
    "asysg": AsySG,
    "fedasync": FedAsync,
    "fedavg": FedAvg,
    "fedbuff": FedBuff,
    "fedfa": FedFa,
    "fedfix": FedFix,
}

"""The aggregation rules. To add a rule, write a module in this folder and add a line to `RULES`."""

from __future__ import annotations

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

RULES: dict[str, type[Rule]] = {
    "area": Area,
    "as_fedavg": AsFedAvg,
    "async_fedavg": AsyncFedAvg,
    "asysg": AsySG,
    "defedavg_iid": DeFedAvgIid,
    "defedavg_niid": DeFedAvgNiid,
    "favano": Favano,
    "fedasync": FedAsync,
    "fedavg": FedAvg,
    "fedbuff": FedBuff,
    "fedfa": FedFa,
    "fedfix": FedFix,
    "port": Port,
}

"""Notes of a plan on secure sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agents.secure.arithmetic import FIELD
from testbed.topology import Topology

if TYPE_CHECKING:  # the plan imports this module
    from testbed.plan.planned_devices import Plan


def notes(topology: Topology, _: Plan) -> Iterator[str]:
    if (secure := topology.secure) is not None:
        largest = secure.updates * secure.largest_weight << secure.bits
        yield (
            f"Secure aggregation: sums of {secure.updates} updates stay in the field, "
            f"{secure.updates} × {secure.largest_weight} × 2^{secure.bits} = {largest:,} of at most "
            f"{FIELD.p:,}. Any {secure.needed} of {len(secure.clients)} clients can open a sum; the "
            f"server and {secure.colluding} clients together learn no single update."
        )

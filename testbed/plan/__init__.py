"""Plan of a run: what a host will do for a topology, with every number of every device; and what is
prepared from both."""

from testbed.host.cpusets import cpuset
from testbed.plan.assignment import plan
from testbed.plan.catalog import Catalog
from testbed.plan.host import Host, this_host
from testbed.plan.plan_tables import by_node, describe
from testbed.plan.planned_devices import Plan, PlannedDevice, dilated

__all__ = [
    "Catalog",
    "Host",
    "Plan",
    "PlannedDevice",
    "by_node",
    "cpuset",
    "describe",
    "dilated",
    "plan",
    "this_host",
]

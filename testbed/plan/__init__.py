"""Plan of a run: what a host will do for a topology, with every number of every device; and what is
prepared from both."""

from testbed.host.cpusets import cpuset
from testbed.plan.assignment import plan
from testbed.plan.catalog import Catalog
from testbed.plan.host import HostResources, this_host
from testbed.plan.plan_tables import device_table, node_table
from testbed.plan.planned_devices import Plan, PlannedDevice, to_host_time

__all__ = [
    "Catalog",
    "HostResources",
    "Plan",
    "PlannedDevice",
    "cpuset",
    "device_table",
    "node_table",
    "plan",
    "this_host",
    "to_host_time",
]

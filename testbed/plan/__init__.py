"""Plan of a run: the resources that a host gives to each device of a topology. The configuration files
of the run's agents are made from the plan."""

from testbed.host.cpus import cpuset
from testbed.plan.assignment import plan
from testbed.plan.catalog import Catalog
from testbed.plan.machines import HostResources, this_host
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

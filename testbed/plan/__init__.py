"""Plan of a run: the topology resolved for this host into concrete devices and quotas, and all that is
prepared from both."""

from testbed.plan.assignment import end_to_end, plan
from testbed.plan.host import Host, this_host
from testbed.plan.plan_tables import by_node, describe
from testbed.plan.planned import Plan, PlannedDevice, cpuset, dilated

__all__ = [
    "Host",
    "Plan",
    "PlannedDevice",
    "by_node",
    "cpuset",
    "describe",
    "dilated",
    "end_to_end",
    "plan",
    "this_host",
]

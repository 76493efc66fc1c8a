"""Placement of devices on several nodes."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from testbed import topology
from testbed.errors import BadInputError
from testbed.host.nodes import Node, ready_nodes, swarm_nodes
from testbed.plan import Catalog, HostResources, Plan, device_table, node_table, plan
from testbed.runtimes.docker.specifications import planned_limits
from testbed.topology import profiles

GIB = 2**30


def nodes(*cores: int, memory: int = 64 * GIB) -> tuple[Node, ...]:
    return tuple(
        Node(
            id=f"id-{number}",
            name=f"node-{number}",
            cores=count,
            memory=memory,
            labels={"rack": "ab"[number % 2]},
            here=number == 0,
        )
        for number, count in enumerate(cores)
    )


def planned(
    devices: str,
    machines: tuple[Node, ...],
    more: str = "",
    cpu: Mapping[str, Mapping[str, float]] | None = None,
    **options: Any,
) -> Plan:
    parsed = topology.parse(
        "name: fleet\ntask: {name: digits-logreg, local: {steps: 20}}\nrule: {name: fedasync}\n"
        f"devices: [{devices}]\nstop: {{updates: 10}}\n{more}"
    )
    host = HostResources((0, 1), 16 * GIB, "no netem", machines)
    return plan(parsed, "swarm", host, Catalog(cpu=cpu or {}), **options)


def test_load_is_balanced_over_nodes() -> None:
    found = planned("{name: big, count: 2, cpu: 2}, {name: small, count: 8, cpu: 0.5}", nodes(5, 5))
    assert Counter(found.placement.values()) == {"id-0": 5, "id-1": 5}
    assert {found.placement["big-1"], found.placement["big-2"]} == {"id-0", "id-1"}
    assert (found.infrastructure_cpus, found.device_capacity) == ("0", 8)
    assert [row["node"] for row in device_table(found)][:2] == ["node-0", "node-1"]


def test_each_device_has_the_cpus_of_its_node_as_its_engine_tells_them() -> None:
    gaps, other = nodes(3, 8)
    found = planned(
        "{name: a, cpu: 0.5, hosts: [node-0]}, {name: b, cpu: 2, hosts: [id-1]}",
        (replace(gaps, cpus=(2, 3, 7)), other),
    )
    assert found.infrastructure_cpus == "2"
    assert [one.cores for one in found.devices] == ["3,7", "1-7"]
    assert planned_limits(found.devices[1]).cpus == "1-7"


def test_swarm_on_this_machine_uses_the_allowed_cpus() -> None:
    engine = Mock(
        info=lambda: {"Swarm": {"ControlAvailable": True, "NodeID": "id-1"}},
        api=Mock(nodes=lambda: [node(1, "vm"), node(2, "vm")]),
    )
    before = os.sched_getaffinity(0)
    last = max(before)
    os.sched_setaffinity(0, {last})
    try:
        own, other = swarm_nodes(engine)
    finally:
        os.sched_setaffinity(0, before)
    assert (own.cpus, own.cores) == ((last,), 1)
    assert (other.cpus, other.cores) == ((), 4)


def test_devices_with_fewest_allowed_nodes_are_placed_first() -> None:
    found = planned(
        "{name: any, count: 14, cpu: 1}, {name: racked, count: 7, cpu: 1, placement: {rack: b}}",
        nodes(8, 8, 8),
    )
    assert {found.placement[f"racked-{n}"] for n in range(1, 8)} == {"id-1"}


def test_time_is_dilated_until_whole_devices_fit() -> None:
    """Three devices of 0.6 are 1.8 cores, but not on two nodes with one each."""
    found = planned("{name: a, count: 3, cpu: 0.6}", nodes(2, 2), "dilation: auto")
    assert 1.2 <= found.dilation < 1.25
    with pytest.raises(BadInputError, match=r"a-3 needs 0\.6 cores"):
        planned("{name: a, count: 3, cpu: 0.6}", nodes(2, 2))
    large = "{name: a, count: 3, cpu: 0.1, memory: 7GiB}"  # for which it would not help
    with pytest.raises(BadInputError, match=r"0\.5 of 7\.5 GiB"):
        planned(large, nodes(2, 2, memory=8 * GIB), "dilation: auto")


def test_device_that_fits_no_node_is_refused_with_each_nodes_capacity() -> None:
    with pytest.raises(BadInputError) as refused:
        planned("{name: a, count: 9, cpu: 0.9, memory: 1GiB}", nodes(4, 5, memory=8 * GIB))
    told = str(refused.value)
    assert "4:11: devices[0]: a-8 needs 0.9 cores and 1.0 GiB" in told
    assert "node-0 0.3 of 3 cores and 4.5 of 7.5 GiB; node-1 0.4 of 4 cores and 3.5 of 7.5 GiB" in told
    with pytest.raises(BadInputError, match="no node matches its hosts or placement"):
        planned("{name: a, cpu: 0.1, placement: {rack: c}}", nodes(2, 2))
    over = planned("{name: a, count: 9, cpu: 0.9, memory: 1GiB}", nodes(4, 5), oversubscribe=True)
    assert len(over.placement) == 9


@pytest.mark.timed
def test_placement_of_1000_devices_on_20_nodes_is_fast() -> None:
    begin = time.process_time()
    found = planned(
        "{name: a, count: 700, cpu: 0.3},{name: b, count: 300, cpu: 0.25, placement: {rack: a}}",
        nodes(*[16] * 20),
    )
    assert time.process_time() - begin < 2
    assert sorted(Counter(found.placement.values()).values())[0] >= 45


def node(
    number: int, name: str, state: str = "ready", availability: str = "active"
) -> dict[str, object]:
    """A node of 4 cores as the engine describes it."""
    return {
        "ID": f"id-{number}",
        "Description": {
            "Hostname": name,
            "Resources": {"NanoCPUs": 4_000_000_000, "MemoryBytes": 8 * GIB},
            "Engine": {"EngineVersion": "20.10.24"},
        },
        "Spec": {"Labels": {"rack": "a"}, "Availability": availability},
        "Status": {"State": state},
    }


def test_nodes_are_read_from_the_engine() -> None:
    told = [node(1, "vm"), node(2, "vm"), node(3, "down", "down"), node(4, "idle", availability="drain")]
    first, second = ready_nodes(told, "id-2")
    assert (first.id, first.name, first.cores, first.memory) == ("id-2", "vm-1", 4, 8 * GIB)
    assert (first.labels, first.engine, first.here) == ({"rack": "a"}, "20.10.24", True)
    assert second == replace(first, id="id-1", name="vm-2", here=False)


def test_devices_sharing_an_access_must_be_on_one_node() -> None:
    shared = "cpu: 0.2, access: {name: wifi, up: 20mbit}"
    with pytest.raises(BadInputError, match="wifi is shared by devices on several nodes"):
        planned(f"{{name: a, count: 2, {shared}}}", nodes(2, 2))
    assert (
        planned(f"{{name: a, count: 2, {shared}, hosts: [node-1]}}", nodes(2, 2)).placement["a-2"]
        == "id-1"
    )


def test_described_machines_are_parsed() -> None:
    found = profiles.parse_machines(
        "nodes: [{name: a, count: 2, cores: 4, memory: 8GiB, labels: {rack: x}}]"
    )
    assert [(one.id, one.here) for one in found] == [("a-1", True), ("a-2", False)]
    assert found[1].memory == 8 * GIB
    with pytest.raises(BadInputError, match=r"<text>:1:9: nodes\[0\]: .*cores"):
        profiles.parse_machines("nodes: [{name: a, memory: 8GiB}]")


def test_profile_share_is_relative_to_the_devices_node() -> None:
    """A device with a profile needs a smaller share of a faster node; its share depends on its node."""
    found = planned(
        "{name: pi, count: 3, cpu: 1}, {name: own, cpu: 0.5, hosts: [node-1]}",
        (replace(nodes(3)[0], core=1.0), replace(nodes(3, 3)[1], core=2.0)),
        cpu={"pi": {"id-0": 1.0, "id-1": 0.5}},
    )
    assert {one.name: (found.placement[one.name], one.cpu, one.core_speed) for one in found.devices} == {
        "pi-1": ("id-0", 1.0, 1.0),
        "pi-2": ("id-1", 0.5, 2.0),
        "pi-3": ("id-0", 1.0, 1.0),
        "own": ("id-1", 0.5, 2.0),
    }
    assert [row["core"] for row in node_table(found)] == ["1.00", "2.00"]


def test_profile_that_fits_no_node_is_reported_with_its_need_on_each() -> None:
    with pytest.raises(BadInputError, match=r"pi-5 needs cores by each node's speed .*node-0"):
        planned("{name: pi, count: 5, cpu: 0.9}", nodes(3, 2), cpu={"pi": {"id-0": 0.9, "id-1": 0.45}})


def test_dilation_follows_the_fastest_nodes() -> None:
    found = planned(
        "{name: pi, count: 4, cpu: 2}",
        nodes(2, 2),
        "dilation: auto",
        cpu={"pi": {"id-0": 2.0, "id-1": 0.5}},
    )
    assert 2.0 <= found.dilation <= 2.05  # all four on the fast node, or one on the slow one


def test_scenario_cannot_exceed_a_nodes_capacity() -> None:
    more = "scenario: [{at: 1s, set: a, cpu: 1.5}]"
    assert planned("{name: a, cpu: 0.5, hosts: [node-1]}", nodes(2, 3), more)
    with pytest.raises(BadInputError, match="can have only 1 on node-0"):
        planned("{name: a, cpu: 0.5, hosts: [node-0]}", nodes(2, 3), more)

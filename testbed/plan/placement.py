"""Placement of devices on nodes. No I/O and no clock."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from testbed.host.nodes import Node

# Placement of devices on nodes, for runtimes with several machines. As on a single host, the first core
# of each node is kept for the processes that serve the node's devices. On the first node, broker and
# aggregator are among these processes. The devices with the largest requests are placed first. Each
# device is placed on the allowed node with the most cores left, so that all nodes are equally busy.

SHARED_CAPACITY = 0.5
"""Cores that all devices together get on a machine with only one core. The processes that serve the
devices use the rest of that core."""
_ROUNDING = 1e-9
"""Tolerance for rounding errors in a sum of shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    id: str
    """Id in the Swarm."""
    name: str
    here: bool
    """Whether the node is this machine."""
    infrastructure: tuple[int, ...]
    """CPUs of the node's router; on this machine also of broker and aggregator."""
    devices: tuple[int, ...]
    evaluation: tuple[int, ...] = ()
    """Empty if evaluations use `infrastructure`."""
    capacity: float
    """Cores that all devices of the node together can have."""
    memory: int
    """Bytes that all devices of the node together can have."""
    labels: Mapping[str, str]
    core: float | None = None
    """Speed of a core of the node, relative to a core of this machine; None if unknown."""


def divide_node(node: Node, reserved: int, evaluating: int = 0) -> PlannedNode:
    """`reserved`: bytes of memory that are not for devices. `evaluating`: number of cores for
    evaluations."""
    cores = node.cpus or tuple(range(node.cores))
    alone = len(cores) > 1
    split = len(cores) - evaluating
    devices = cores[1:split] if alone else cores
    return PlannedNode(
        id=node.id,
        name=node.name,
        here=node.here,
        infrastructure=cores[:1],
        devices=devices,
        evaluation=cores[split:],
        capacity=float(len(devices)) if alone else SHARED_CAPACITY,
        memory=max(0, node.memory - reserved),
        labels=node.labels,
        core=node.core,
    )


@dataclass(frozen=True, slots=True)
class NodeRequest:
    device: str
    share: float
    """Cores in the host's time. If the share differs between nodes, this is the largest."""
    memory: int
    """Bytes."""
    hosts: tuple[str, ...] = ()
    """Names or ids of the allowed nodes; empty if any node is allowed."""
    labels: tuple[tuple[str, str], ...] = ()
    shares: Mapping[str, float] | None = None
    """Node's id -> CPU share on that node, in cores; None if the share is `share` on every node."""

    def share_on(self, node: str) -> float:
        return self.share if self.shares is None else self.shares[node]

    @property
    def kind(self) -> tuple[object, ...]:
        """Devices with equal requirements are allowed on the same nodes."""
        return self.hosts, self.labels

    def may_be_on(self, node: PlannedNode) -> bool:
        named = not self.hosts or node.name in self.hosts or node.id in self.hosts
        return named and all(node.labels.get(key) == value for key, value in self.labels)


@dataclass(frozen=True, slots=True)
class UnplacedDevice:
    request: NodeRequest
    why: str
    """Reason, as the rest of a sentence that begins with the device's name."""
    by_cores: bool
    """Whether the device would fit with a smaller CPU share."""


def place(
    requests: Iterable[NodeRequest], nodes: Sequence[PlannedNode], *, oversubscribe: bool = False
) -> dict[str, str] | UnplacedDevice:
    """Return device -> node's id, or the first device that does not fit."""
    cores = {node.id: node.capacity for node in nodes}
    memory = {node.id: node.memory for node in nodes}
    order = {node.id: number for number, node in enumerate(nodes)}
    asked = list(requests)
    heaps: dict[tuple[object, ...], list[tuple[float, int, str]]] = {}  # by kind of request
    for request in asked:
        if request.kind not in heaps:
            heap = [(-cores[n.id], order[n.id], n.id) for n in nodes if request.may_be_on(n)]
            heapq.heapify(heap)
            heaps[request.kind] = heap
    choice = {kind: len(heap) for kind, heap in heaps.items()}
    placed: dict[str, str] = {}
    for request in sorted(asked, key=lambda one: (choice[one.kind], -one.share)):
        heap, passed = heaps[request.kind], []
        chosen = None
        while heap:
            free, number, node = heapq.heappop(heap)
            if -free != cores[node]:  # outdated: a device of another kind was placed there
                heapq.heappush(heap, (-cores[node], number, node))
                continue
            passed.append((free, number, node))
            fits = request.share_on(node) <= cores[node] + _ROUNDING and request.memory <= memory[node]
            if fits or oversubscribe:
                chosen = node
                break
            if request.shares is None and request.share > cores[node] + _ROUNDING:
                break  # the remaining nodes have even less
        if chosen is not None:
            passed.pop()
            cores[chosen] -= request.share_on(chosen)
            memory[chosen] -= request.memory
            heapq.heappush(heap, (-cores[chosen], order[chosen], chosen))
            placed[request.device] = chosen
        for entry in passed:
            heapq.heappush(heap, entry)
        if chosen is None:
            allowed = [node for node in nodes if request.may_be_on(node)]
            roomy = any(request.memory <= memory[node.id] for node in allowed)
            return UnplacedDevice(request, _why(request, allowed, nodes, cores, memory), roomy)
    return placed


def _why(
    request: NodeRequest,
    allowed: Sequence[PlannedNode],
    nodes: Sequence[PlannedNode],
    cores: Mapping[str, float],
    memory: Mapping[str, int],
) -> str:
    if not allowed:
        names = ", ".join(node.name for node in nodes)
        return f"no node matches its hosts or placement; the Swarm has {names}"
    shown = [
        f"{node.name} {_share_text(request, node)}"
        f"{max(0.0, cores[node.id]):.3g} of {node.capacity:g} cores and "
        f"{memory[node.id] / 2**30:.1f} of {node.memory / 2**30:.1f} GiB"
        for node in allowed[:_SHOWN]
    ]
    others = f", and no more on {len(allowed) - _SHOWN} other nodes" if len(allowed) > _SHOWN else ""
    needs = f"{request.share:.3g} cores" if request.shares is None else "cores by each node's speed"
    return (
        f"needs {needs} and {request.memory / 2**30:.1f} GiB, but the devices placed before it "
        f"leave: {'; '.join(shown)}{others}"
    )


def _share_text(request: NodeRequest, node: PlannedNode) -> str:
    """Empty if the share is the same on all nodes."""
    return "" if request.shares is None else f"({request.share_on(node.id):.3g} needed) "


_SHOWN = 20
"""Maximum number of nodes listed in a message."""

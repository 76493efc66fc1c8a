"""Which device goes to which node, where there are several machines. Pure.

Each node keeps its first core for what serves its devices, as a single host does; on the first node that
is broker and aggregator as well. The devices that need most are placed first, each on the node that has
the most cores left of those that it may be on, so that all nodes are equally busy.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from testbed.host.nodes import Node

SHARED_CAPACITY = 0.5
"""Cores for the devices of a machine that has a single one, shared with what serves them."""
_ROUNDING = 1e-9
"""Error allowed in a sum of shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    """What of a node is for what."""

    id: str
    name: str
    here: bool
    infrastructure: tuple[int, ...]
    """Numbers of the CPUs of router, and where it is `here` of broker and aggregator."""
    devices: tuple[int, ...]
    """Those of the devices."""
    evaluation: tuple[int, ...] = ()
    """Those of evaluations alone."""
    capacity: float
    """Cores that its devices can have in all."""
    memory: int
    """Bytes that they can have in all."""
    labels: Mapping[str, str]
    core: float | None = None
    """How fast one of its cores is, in cores of this machine; None: not known."""


def planned(node: Node, reserved: int, evaluating: int = 0) -> PlannedNode:
    """What of `node` is for what; `reserved` bytes of its memory are not for devices, and `evaluating`
    of its cores are for evaluations."""
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
class Wish:
    """What a device needs of a node."""

    device: str
    share: float
    """Of a core, in the host's time; the most that it needs on any node."""
    memory: int
    hosts: tuple[str, ...] = ()
    """Names or ids of the nodes that it may be on; none: any."""
    labels: tuple[tuple[str, str], ...] = ()
    """What its node's labels have to be."""
    shares: Mapping[str, float] | None = None
    """Of a core of each node, by its id, where nodes are not equally fast; None: `share` of any."""

    def share_on(self, node: str) -> float:
        """Of a core of that node."""
        return self.share if self.shares is None else self.shares[node]

    @property
    def kind(self) -> tuple[object, ...]:
        """The same for all that may be on the same nodes."""
        return self.hosts, self.labels

    def may_be_on(self, node: PlannedNode) -> bool:
        named = not self.hosts or node.name in self.hosts or node.id in self.hosts
        return named and all(node.labels.get(key) == value for key, value in self.labels)


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A device that fits on no node any more."""

    wish: Wish
    why: str
    by_cores: bool
    """Whether it would fit if it needed less of a core."""


def place(
    wishes: Iterable[Wish], nodes: Sequence[PlannedNode], *, oversubscribe: bool = False
) -> dict[str, str] | Unplaced:
    """The id of each device's node; or the first that does not fit, with numbers of each node."""
    cores = {node.id: node.capacity for node in nodes}
    memory = {node.id: node.memory for node in nodes}
    order = {node.id: number for number, node in enumerate(nodes)}
    asked = list(wishes)
    heaps: dict[tuple[object, ...], list[tuple[float, int, str]]] = {}  # of those with the same nodes
    for wish in asked:
        if wish.kind not in heaps:
            heap = [(-cores[n.id], order[n.id], n.id) for n in nodes if wish.may_be_on(n)]
            heapq.heapify(heap)
            heaps[wish.kind] = heap
    choice = {kind: len(heap) for kind, heap in heaps.items()}
    placed: dict[str, str] = {}
    for wish in sorted(asked, key=lambda one: (choice[one.kind], -one.share)):
        heap, passed = heaps[wish.kind], []
        chosen = None
        while heap:
            free, number, node = heapq.heappop(heap)
            if -free != cores[node]:  # another kind has taken some of it meanwhile
                heapq.heappush(heap, (-cores[node], number, node))
                continue
            passed.append((free, number, node))
            fits = wish.share_on(node) <= cores[node] + _ROUNDING and wish.memory <= memory[node]
            if fits or oversubscribe:
                chosen = node
                break
            if wish.shares is None and wish.share > cores[node] + _ROUNDING:
                break  # the others have less
        if chosen is not None:
            passed.pop()
            cores[chosen] -= wish.share_on(chosen)
            memory[chosen] -= wish.memory
            heapq.heappush(heap, (-cores[chosen], order[chosen], chosen))
            placed[wish.device] = chosen
        for entry in passed:
            heapq.heappush(heap, entry)
        if chosen is None:
            allowed = [node for node in nodes if wish.may_be_on(node)]
            roomy = any(wish.memory <= memory[node.id] for node in allowed)
            return Unplaced(wish, _why(wish, allowed, nodes, cores, memory), roomy)
    return placed


def _why(
    wish: Wish,
    allowed: Sequence[PlannedNode],
    nodes: Sequence[PlannedNode],
    cores: Mapping[str, float],
    memory: Mapping[str, int],
) -> str:
    """What each node of `allowed` has left."""
    if not allowed:
        names = ", ".join(node.name for node in nodes)
        return f"no node is as its hosts or placement ask; the Swarm has {names}"
    shown = [
        f"{node.name} {_needed(wish, node)}"
        f"{max(0.0, cores[node.id]):.3g} of {node.capacity:g} cores and "
        f"{memory[node.id] / 2**30:.1f} of {node.memory / 2**30:.1f} GiB"
        for node in allowed[:_SHOWN]
    ]
    others = f", and {len(allowed) - _SHOWN} others no more" if len(allowed) > _SHOWN else ""
    needs = f"{wish.share:.3g} cores" if wish.shares is None else "cores by the speed of each node's"
    return (
        f"needs {needs} and {wish.memory / 2**30:.1f} GiB, and with the devices before "
        f"it the nodes have left: {'; '.join(shown)}{others}"
    )


def _needed(wish: Wish, node: PlannedNode) -> str:
    """What it would need there, where that is not the same on all nodes."""
    return "" if wish.shares is None else f"({wish.share_on(node.id):.3g} needed) "


_SHOWN = 20
"""Nodes with their numbers in a message."""

"""Machines of a run: resources, shaper of the links, measurements, and placement of devices on nodes."""

from __future__ import annotations

import heapq
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from pydantic import Field

from testbed.host import kernel
from testbed.host.gpus import NOT_LOOKED_FOR, Gpus
from testbed.host.nodes import Node
from testbed.topology import Topology, Virtual, validation_errors, yamlfile
from testbed.topology.fields import Cpu, Model
from testbed.topology.yamlfile import Problem
from testbed.traits import Traits

# Shapers, which emulate a run's links.
#
# `netem`: the device's own network namespace has a token bucket filter (tbf) for each direction, and
# netem is the child qdisc of each tbf. `tbf+delay`: the device has the same tbf, and the router between
# devices and broker has a delay line. In both cases, tbf limits the rates. `relay`: local processes
# share their host's network, so they use a relay (testbed.relay).


@dataclass(frozen=True, slots=True)
class Shaper:
    name: str
    """`netem`, `tbf+delay` or `relay`."""
    why: str

    @property
    def is_netem(self) -> bool:
        return self.name == "netem"


def choose_shaper(
    topology: Topology, runtime: Traits, lack: str | None
) -> tuple[Shaper | None, list[Problem]]:
    """`lack`: why the kernel's netem cannot be used; None if it can. There is no shaper if there are no
    links."""
    linked = any(
        (group.link is not None or group.segment_name is not None) and not group.is_real
        for group in topology.devices
    )
    linked = linked or any(entry.link is not None for entry in topology.scenario)
    if runtime.simulated or not linked:
        return None, []
    if runtime.shaper is not None:
        return Shaper(runtime.shaper, runtime.shaper_why), []
    requested = topology.runtime.shaper
    if requested == "netem" and lack is not None:
        text = f"found netem, but {lack}: use auto or tbf+delay, or see `testbed doctor` for the fix"
        return None, [topology.source.problem(("runtime", "shaper"), text)]
    if requested != "auto":
        return Shaper(requested, "asked for"), []
    if runtime.many_hosts:
        lack = "other machines' kernels may have no netem"
    if lack is not None:
        return Shaper("tbf+delay", f"auto: {lack}"), []
    return Shaper("netem", "auto: this kernel has it"), []


def lack_of_netem() -> str | None:
    works, answer = kernel.supports(kernel.NETEM)
    if works is None:
        return f"it is unknown whether this kernel has netem ({answer})"
    return None if works else f"this kernel has no netem ({answer})"


@dataclass(frozen=True, slots=True)
class HostResources:
    """Resources of this machine for a run."""

    cores: tuple[int, ...]
    """Numbers of the CPUs that this process may use."""
    memory: int
    """Available bytes."""
    lack_of_netem: str | None = "netem was not tried"
    """None if the kernel's netem can be used."""
    nodes: tuple[Node, ...] = ()
    """This machine first; empty if the runtime uses one machine."""
    gpus: Gpus = NOT_LOOKED_FOR
    lack_of_cuda: str | None = "CUDA was not tried"
    """None if this host's PyTorch can use a GPU."""

    @property
    def as_node(self) -> Node:
        """The only node, for a runtime that uses one machine."""
        return Node(
            id="", name="", cores=len(self.cores), memory=self.memory, cpus=self.cores, here=True
        )


def this_host(
    nodes: tuple[Node, ...] = (), *, netem: bool = False, gpus: bool = False, cuda: bool = False
) -> HostResources:
    """`nodes`: the machines, if the runtime uses several. `netem`: whether to try the kernel's netem.
    `gpus`: whether to survey the GPUs for containers. `cuda`: whether to try CUDA in this host's
    PyTorch."""
    linux = sys.platform == "linux"
    cores = sorted(os.sched_getaffinity(0)) if linux else range(os.cpu_count() or 1)
    host = HostResources(tuple(cores), psutil.virtual_memory().available, nodes=nodes)
    if netem:
        host = replace(host, lack_of_netem=lack_of_netem())
    if gpus:
        host = replace(host, gpus=_gpus_for_containers())
    return replace(host, lack_of_cuda=_lack_of_cuda()) if cuda else host


def _gpus_for_containers() -> Gpus:
    from testbed.host import docker_engine  # imports the Docker SDK, which takes half a second
    from testbed.host.gpus import survey

    with docker_engine.connect_if_present() as client:
        return survey({} if client is None else client.info())


def _lack_of_cuda() -> str | None:
    import torch  # takes a second

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            f"the PyTorch of this host, {torch.__version__}, is built without CUDA: install a build "
            "with CUDA (PyTorch's install page names the index), on a host with a GPU"
        )
    return f"the PyTorch of this host, {torch.__version__}, finds no GPU: run nvidia-smi for the reason"


FILE = "measured.yaml"


class Measurements(Model):
    cpu: dict[str, Cpu] = Field(
        default={},
        description="Group, or drawn device -> CPU share, in cores of that host, that is as fast as the "
        "profile",
    )
    virtual: Virtual = Field(default=Virtual(), description="Costs for virtual time")

    @classmethod
    def read(cls, folder: Path) -> Measurements:
        """Raises BadInputError if the file is invalid."""
        path = folder / FILE
        return validation_errors.validate(cls, yamlfile.read(path)) if path.is_file() else cls()

    def write(self, path: Path) -> None:
        if self != Measurements():
            text = yamlfile.write(self.model_dump(mode="json", exclude_defaults=True))
            path.write_text(text, encoding="utf-8")


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

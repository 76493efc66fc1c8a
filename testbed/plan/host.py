"""This machine for a run: its resources, the shaper of its links, and what is measured on it."""

from __future__ import annotations

import os
import sys
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

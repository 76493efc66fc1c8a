"""Resources of this machine for a run."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace

import psutil

from testbed.host.gpus import NOT_LOOKED_FOR, Gpus
from testbed.host.nodes import Node
from testbed.plan.shaper import lack_of_netem


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


def this_host(*, netem: bool = False, gpus: bool = False, cuda: bool = False) -> HostResources:
    """`netem`: whether to try the kernel's netem. `gpus`: whether to survey the GPUs for containers.
    `cuda`: whether to try CUDA in this host's PyTorch."""
    linux = sys.platform == "linux"
    cores = sorted(os.sched_getaffinity(0)) if linux else range(os.cpu_count() or 1)
    host = HostResources(tuple(cores), psutil.virtual_memory().available)
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

"""What this machine has for a run."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace

import psutil

from testbed.host.gpus import NOT_LOOKED_FOR, Gpus
from testbed.host.nodes import Node
from testbed.plan.shaper import lack_of_netem


@dataclass(frozen=True, slots=True)
class Host:
    """What this machine has for a run."""

    cores: tuple[int, ...]
    """Numbers of the CPUs that we may use."""
    memory: int
    """Available bytes."""
    lack_of_netem: str | None = "netem was not tried"
    """Why the kernel's netem cannot be used; None where it can."""
    nodes: tuple[Node, ...] = ()
    """The machines that devices are placed on, where there are several: this one first."""
    gpus: Gpus = NOT_LOOKED_FOR
    """For containers."""
    lack_of_cuda: str | None = "CUDA was not tried"
    """Why the PyTorch of this host has no GPU; None where it has one."""


def this_host(*, netem: bool = False, gpus: bool = False, cuda: bool = False) -> Host:
    """This host, measured now: the CPUs that this process may use, the free memory and, with `netem`,
    whether the kernel has it; with `gpus` those that containers can have; with `cuda` whether its
    PyTorch has one."""
    linux = sys.platform == "linux"
    cores = sorted(os.sched_getaffinity(0)) if linux else range(os.cpu_count() or 1)
    host = Host(tuple(cores), psutil.virtual_memory().available)
    if netem:
        host = replace(host, lack_of_netem=lack_of_netem())
    if gpus:
        host = replace(host, gpus=_gpus_for_containers())
    return replace(host, lack_of_cuda=_lack_of_cuda()) if cuda else host


def _gpus_for_containers() -> Gpus:
    from testbed.host import docker_engine  # with the Docker SDK, which takes half a second
    from testbed.host.gpus import survey

    with docker_engine.connect_if_present() as client:
        return survey({} if client is None else client.info())


def _lack_of_cuda() -> str | None:
    import torch  # which takes a second

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            f"the PyTorch of this host, {torch.__version__}, is built without CUDA: install one with it "
            "(PyTorch's install page names the index), on a host with a GPU"
        )
    return f"the PyTorch of this host, {torch.__version__}, finds no GPU: nvidia-smi may say why"

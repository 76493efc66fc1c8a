"""Meter of the resources that a run's containers use on this host."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import psutil

from agents.wire.messages import GpuFigures, GpuSample
from testbed.host import cgroups, gpus
from testbed.host.cgroups import DEVICES
from testbed.host.gpus import Use
from testbed.plan.agent_configs import RunSpec
from testbed.runtimes import SERVERS, Meter
from testbed.runtimes.docker.running_containers import RunningContainers


class DockerMeter(Meter):
    """Devices send their CPU use, memory and traffic themselves. The meter reads GPU use: the driver
    identifies processes by the host's ids, which containers do not know."""

    def __init__(self, spec: RunSpec, containers: RunningContainers) -> None:
        self._run = spec.directory.run
        self._containers = containers
        self._with_gpu = [device.name for device in spec.plan.devices if device.gpu is not None]
        self._gpus: gpus.GpuMeter | None = None
        self.lack_of_gpus: str | None = None
        """Why the use of GPUs cannot be read; None if it can, or no device has a GPU."""
        if uuids := {device.gpu.uuid for device in spec.plan.devices if device.gpu is not None}:
            try:
                self._gpus = gpus.GpuMeter(sorted(uuids))
            except OSError as error:
                self.lack_of_gpus = str(error)

    def telemetry(self) -> Sequence[GpuSample]:
        if self._gpus is None:
            return []
        used, at = self._gpus.read(), time.monotonic()
        return [
            GpuSample(name, at, total_gpu_use([used[pid] for pid in pids if pid in used]))
            for name, pids in zip(self._with_gpu, map(self._processes, self._with_gpu), strict=True)
            if pids
        ]

    def externally_stopped(self) -> set[str]:
        """Containers that were paused in the last list, and servers that a signal has stopped. A
        device's init reports that itself."""
        return self._containers.stopped(SERVERS)

    def groups(self) -> Collection[str]:
        return cgroups.names(self._run)

    def server_pids(self) -> list[int]:
        return self._containers.pids(SERVERS)

    def device_cpu_seconds(self) -> float | None:
        return cgroups.cpu_seconds(self._run, DEVICES)

    def close(self) -> None:
        """Close the connection to the GPU driver. Idempotent."""
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None

    def _processes(self, device: str) -> list[int]:
        """Empty if they have ended or run on another host."""
        try:
            init = psutil.Process(self._containers.pids([device])[0])
            return [init.pid, *(child.pid for child in init.children(recursive=True))]
        except (psutil.NoSuchProcess, IndexError):
            return []


def total_gpu_use(used: Sequence[Use]) -> GpuFigures:
    memory = [one.memory for one in used if one.memory is not None]
    busy = [one.sm for one in used if one.sm is not None]
    return GpuFigures(
        memory=sum(memory) if memory or not used else None,
        sm=min(1.0, sum(busy)) if busy or not used else None,
        mps=bool(used) and all(one.mps for one in used),
    )

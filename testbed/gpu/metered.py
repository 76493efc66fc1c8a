"""GPU use of devices in containers, from the driver of this host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import psutil

from agents.wire.messages import GpuFigures, GpuSample
from testbed.host import gpus
from testbed.host.gpus import Use
from testbed.plan import PlannedDevice


class ContainerGpus:
    """Read in this process: the driver identifies processes by the host's ids, which containers do not
    know. `pids`: ids of the first processes of components."""

    def __init__(
        self, devices: Sequence[PlannedDevice], pids: Callable[[Iterable[str]], list[int]]
    ) -> None:
        self._devices = [device.name for device in devices if device.gpu is not None]
        self._pids = pids
        self._meter: gpus.GpuMeter | None = None
        self.lack: str | None = None
        """Why the use cannot be read; None if it can, or no device has a GPU."""
        if uuids := {device.gpu.uuid for device in devices if device.gpu is not None}:
            try:
                self._meter = gpus.GpuMeter(sorted(uuids))
            except OSError as error:
                self.lack = str(error)

    def samples(self) -> Sequence[GpuSample]:
        if self._meter is None:
            return []
        used, at = self._meter.read(), time.monotonic()
        return [
            GpuSample(name, at, total_gpu_use([used[pid] for pid in pids if pid in used]))
            for name, pids in zip(self._devices, map(self._processes, self._devices), strict=True)
            if pids
        ]

    def close(self) -> None:
        """Close the connection to the driver. Idempotent."""
        if self._meter is not None:
            self._meter.close()
            self._meter = None

    def _processes(self, device: str) -> list[int]:
        """Empty if they have ended or run on another host."""
        try:
            init = psutil.Process(self._pids([device])[0])
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

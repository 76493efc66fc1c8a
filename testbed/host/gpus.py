"""NVIDIA's GPUs of this host, by NVML: which there are, what keeps a run from having them, and what
processes use of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

CUDA = 13, 0
"""What the PyTorch of the image for GPUs is built for (images/libraries-cuda)."""
MPS = "mps"
"""Name of this component of a run."""
MPS_CLIENTS = 48
"""So many MPS serves on one GPU."""
_MPS_CAPABILITY = 7, 0
"""Volta: from there on MPS limits a client."""
_HOOK = "nvidia-container-runtime-hook"
"""Of the NVIDIA Container Toolkit: an engine that finds it takes requests for GPUs."""
_TOOLKIT_FIX = (
    "install NVIDIA's package source (the container toolkit's installation guide), then sudo apt-get "
    "install nvidia-container-toolkit && sudo nvidia-ctk runtime configure --runtime=docker && sudo "
    "systemctl restart docker"
)


@dataclass(frozen=True, slots=True)
class Lack:
    """What is missing, and the command that mends it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}. To mend it: {self.fix}"


@dataclass(frozen=True, slots=True)
class HostGpu:
    uuid: str
    name: str
    memory: int
    """Bytes."""
    capability: tuple[int, int]
    """CUDA's compute capability."""

    @property
    def shares(self) -> bool:
        """Whether MPS can limit what a process has of it."""
        return self.capability >= _MPS_CAPABILITY


@dataclass(frozen=True, slots=True)
class Gpus:
    """What this host has for devices with a GPU."""

    found: tuple[HostGpu, ...] = ()
    lack: Lack | None = None
    """Why no container can have one; None: it can."""
    lack_of_mps: Lack | None = None
    """Why none can be shared by limits."""


NOT_LOOKED_FOR = Gpus(lack=Lack("GPUs were not looked for", "look for them"))


def survey(engine: Mapping[str, Any], nvml: Any = None) -> Gpus:
    """This host's GPUs, as far as containers of the engine that says `engine` (`docker info`) of itself
    can have them. `nvml` is the module pynvml, or what stands for it."""
    nvml = nvml or _nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus(lack=_no_driver(nvml, error))
    try:
        found = tuple(_undivided_gpus(nvml))
        cuda = divmod(nvml.nvmlSystemGetCudaDriverVersion_v2(), 1000)
        driver = str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        return Gpus(lack=Lack(f"NVIDIA's driver does not answer ({error})", "nvidia-smi says more"))
    finally:
        nvml.nvmlShutdown()
    gpus = Gpus(found, lack_of_mps=_lack_of_mps(driver))
    version = cuda[0], cuda[1] // 10
    if not found:
        what = "NVIDIA's driver finds no GPU, or has divided all of them (MIG)"
        return replace(gpus, lack=Lack(what, "sudo nvidia-smi -mig 0, or use a host with a GPU"))
    if version < CUDA:
        what = (
            f"NVIDIA's driver {driver} is for CUDA {version[0]}.{version[1]}, and the image's PyTorch "
            f"needs {CUDA[0]}.{CUDA[1]}"
        )
        return replace(gpus, lack=Lack(what, "install a newer driver, and boot again"))
    if not _has_toolkit(engine):
        what = "the Docker engine cannot give containers a GPU: it has no NVIDIA Container Toolkit"
        return replace(gpus, lack=Lack(what, _TOOLKIT_FIX))
    return gpus


def _nvml() -> Any:
    import pynvml  # where somebody asks for a GPU

    return pynvml


def _no_driver(nvml: Any, error: Exception) -> Lack:
    if getattr(error, "value", None) == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return Lack("NVIDIA's driver is not loaded", "sudo modprobe nvidia, or boot again")
    if getattr(error, "value", None) == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return Lack(
            "this host has no NVIDIA driver",
            "on a host with a GPU of NVIDIA's, sudo ubuntu-drivers install (Ubuntu) or sudo apt-get "
            "install nvidia-driver (Debian), and boot again",
        )
    return Lack(f"NVIDIA's driver does not answer ({error})", "nvidia-smi says more")


def _lack_of_mps(driver: str) -> Lack | None:
    """What the container toolkit would have to mount from this host, and is not there."""
    if shutil.which("nvidia-cuda-mps-control") and shutil.which("nvidia-cuda-mps-server"):
        return None
    major = driver.partition(".")[0]
    return Lack(
        "NVIDIA's MPS, which shares a GPU by limits, is not on this host (nvidia-cuda-mps-control)",
        f"sudo apt-get install nvidia-compute-utils-{major} (Ubuntu), nvidia-cuda-mps (Debian)",
    )


def _has_toolkit(engine: Mapping[str, Any]) -> bool:
    """Whether the engine takes requests for GPUs, by any of the signs that there are of it."""
    devices = engine.get("DiscoveredDevices") or ()  # by CDI
    cdi = any(str(device.get("ID", "")).startswith("nvidia.com/gpu") for device in devices)
    return cdi or "nvidia" in (engine.get("Runtimes") or {}) or shutil.which(_HOOK) is not None


def _undivided_gpus(nvml: Any) -> Iterator[HostGpu]:
    """The GPUs that are not divided: of one that is, no process has more than a part (MIG)."""
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if not _is_divided(nvml, handle):
            yield HostGpu(
                str(nvml.nvmlDeviceGetUUID(handle)),
                str(nvml.nvmlDeviceGetName(handle)),
                int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
            )


def _is_divided(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # it cannot be divided
        return False
    return bool(current)


@dataclass(frozen=True, slots=True)
class Use:
    """What a process uses of a GPU; None: NVML does not tell."""

    memory: int | None
    """Bytes."""
    mps: bool
    """Whether it is a client of MPS."""
    sm: float | None
    """Share of the time since the last reading in which a kernel of it ran. Of MPS's clients NVML does
    not tell: it counts their time as the server's."""


class GpuMeter:
    """Reads what the processes of this host use of the GPUs with these UUIDs. Raises OSError if NVML
    does not answer."""

    def __init__(self, uuids: Iterable[str], nvml: Any = None) -> None:
        self._nvml = nvml = nvml or _nvml()
        self._seen: dict[Any, int] = {}
        """NVML's time of the newest sample of each GPU, µs."""
        try:
            nvml.nvmlInit()
            self._handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def read(self) -> dict[int, Use]:
        """By process id of this host: the driver knows no other."""
        found: dict[int, Use] = {}
        for index, handle in enumerate(self._handles):
            busy = self._busy(index, handle)
            for process in self._processes("nvmlDeviceGetComputeRunningProcesses", handle):
                sm = None if busy is None else busy.get(process.pid, 0.0)
                found[process.pid] = Use(process.usedGpuMemory, mps=False, sm=sm)
            for process in self._processes("nvmlDeviceGetMPSComputeRunningProcesses", handle):
                found[process.pid] = Use(process.usedGpuMemory, mps=True, sm=None)
        return found

    def _processes(self, function: str, handle: Any) -> list[Any]:
        try:
            return list(getattr(self._nvml, function)(handle))
        except self._nvml.NVMLError:  # older drivers and some GPUs have it not
            return []

    def _busy(self, index: int, handle: Any) -> dict[int, float] | None:
        """Mean share of time of each process that had any, since the last call."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, self._seen.get(index, 0))
        except self._nvml.NVMLError as error:
            return {} if error.value == self._nvml.NVML_ERROR_NOT_FOUND else None
        by_pid: dict[int, list[float]] = {}
        for sample in samples:
            self._seen[index] = max(self._seen.get(index, 0), sample.timeStamp)
            by_pid.setdefault(sample.pid, []).append(sample.smUtil / 100)
        return {pid: sum(shares) / len(shares) for pid, shares in by_pid.items()}

    def close(self) -> None:
        self._nvml.nvmlShutdown()

"""NVIDIA GPUs of this host, by NVML: which GPUs exist, what is missing to use them, and how much of a
GPU each process uses."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

CUDA = 13, 0
"""CUDA version of PyTorch in the image for GPUs (images/libraries-cuda)."""
MPS = "mps"
MPS_CLIENTS = 48
_MPS_CAPABILITY = 7, 0
"""Volta: the lowest at which MPS can limit a GPU's clients."""
_HOOK = "nvidia-container-runtime-hook"
"""NVIDIA Container Toolkit. An engine that finds this program accepts requests for GPUs."""
_TOOLKIT_FIX = (
    "install NVIDIA's package source (the container toolkit's installation guide), then sudo apt-get "
    "install nvidia-container-toolkit && sudo nvidia-ctk runtime configure --runtime=docker && sudo "
    "systemctl restart docker"
)


@dataclass(frozen=True, slots=True)
class Lack:
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}. To fix it: {self.fix}"


@dataclass(frozen=True, slots=True)
class HostGpu:
    uuid: str
    name: str
    memory: int
    """Total bytes."""
    capability: tuple[int, int]

    @property
    def shares(self) -> bool:
        """Whether MPS can limit a process's share of this GPU."""
        return self.capability >= _MPS_CAPABILITY


@dataclass(frozen=True, slots=True)
class Gpus:
    found: tuple[HostGpu, ...] = ()
    """GPUs that are not divided by MIG."""
    lack: Lack | None = None
    """None if containers can use a GPU."""
    lack_of_mps: Lack | None = None
    """None if a GPU can be shared with limits."""


NOT_LOOKED_FOR = Gpus(lack=Lack("GPUs were not looked for", "look for them"))


def survey(engine: Mapping[str, Any], nvml: Any = None) -> Gpus:
    """`engine`: from `docker info`. `nvml`: the module pynvml, or a replacement for tests."""
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
        what = "NVIDIA's driver finds no GPU, or all of them are divided (MIG)"
        return replace(gpus, lack=Lack(what, "sudo nvidia-smi -mig 0, or use a host with a GPU"))
    if version < CUDA:
        what = (
            f"NVIDIA's driver {driver} supports CUDA {version[0]}.{version[1]}, but the image's PyTorch "
            f"needs {CUDA[0]}.{CUDA[1]}"
        )
        return replace(gpus, lack=Lack(what, "install a newer driver, and reboot"))
    if not _has_toolkit(engine):
        what = "the Docker engine cannot give containers a GPU: it has no NVIDIA Container Toolkit"
        return replace(gpus, lack=Lack(what, _TOOLKIT_FIX))
    return gpus


def _nvml() -> Any:
    import pynvml  # here, because most runs use no GPU

    return pynvml


def _no_driver(nvml: Any, error: Exception) -> Lack:
    if getattr(error, "value", None) == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return Lack("NVIDIA's driver is not loaded", "sudo modprobe nvidia, or reboot")
    if getattr(error, "value", None) == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return Lack(
            "this host has no NVIDIA driver",
            "on a host with an NVIDIA GPU, sudo ubuntu-drivers install (Ubuntu) or sudo apt-get install "
            "nvidia-driver (Debian), and reboot",
        )
    return Lack(f"NVIDIA's driver does not answer ({error})", "nvidia-smi says more")


def _lack_of_mps(driver: str) -> Lack | None:
    """The container toolkit mounts MPS's programs from the host into containers."""
    if shutil.which("nvidia-cuda-mps-control") and shutil.which("nvidia-cuda-mps-server"):
        return None
    major = driver.partition(".")[0]
    return Lack(
        "NVIDIA's MPS, which limits shares of a GPU, is not installed here (nvidia-cuda-mps-control)",
        f"sudo apt-get install nvidia-compute-utils-{major} (Ubuntu), nvidia-cuda-mps (Debian)",
    )


def _has_toolkit(engine: Mapping[str, Any]) -> bool:
    """Look for CDI, a runtime, and the toolkit's hook."""
    devices = engine.get("DiscoveredDevices") or ()
    cdi = any(str(device.get("ID", "")).startswith("nvidia.com/gpu") for device in devices)
    return cdi or "nvidia" in (engine.get("Runtimes") or {}) or shutil.which(_HOOK) is not None


def _undivided_gpus(nvml: Any) -> Iterator[HostGpu]:
    """A process can use only a part of a GPU that MIG divides."""
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
    except nvml.NVMLError:  # the GPU does not support MIG
        return False
    return bool(current)


@dataclass(frozen=True, slots=True)
class Use:
    memory: int | None
    """Used bytes; None if NVML does not report it."""
    mps: bool
    """Whether the process is a client of MPS."""
    sm: float | None
    """Share of the time since the previous reading in which the process had a kernel running; None if
    NVML does not report it. NVML never reports this share for clients of MPS, because it counts the time
    of MPS clients as time of the MPS server."""


class GpuMeter:
    def __init__(self, uuids: Iterable[str], nvml: Any = None) -> None:
        """`uuids`: GPUs to measure. `nvml`: the module pynvml, or a replacement for tests. Raises
        OSError if NVML does not answer."""
        self._nvml = nvml = nvml or _nvml()
        self._seen: dict[Any, int] = {}
        """Index of a GPU -> time of its latest sample, in µs on NVML's clock."""
        try:
            nvml.nvmlInit()
            self._handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def read(self) -> dict[int, Use]:
        """By process id on this host, because the driver does not know the ids that processes have in
        containers."""
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
        except self._nvml.NVMLError:  # not supported by older drivers and some GPUs
            return []

    def _busy(self, index: int, handle: Any) -> dict[int, float] | None:
        """Return process id -> mean share of the GPU's time since the previous call; None if NVML does
        not report it."""
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

"""GPU and CPU of a client's process: their limits, and the pace of its work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from agents.config import ClientConfig
from agents.device.control_group import ControlGroup

if TYPE_CHECKING:
    import torch

# GPU of a client: its memory limit, and messages about it.
#
# torch is imported inside the functions: that takes a second, and a client joins the run before.


def prepare_gpu(cfg: ClientConfig) -> None:
    """Limit the GPU memory that PyTorch allocates, and log the GPU. Exit with a message if there is
    none. Do nothing on the CPU. With MPS, the logged multiprocessors are those that this client may
    use."""
    if cfg.device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            f"client {cfg.setup.client}: PyTorch {torch.__version__} finds no GPU here (CUDA "
            f"{torch.version.cuda or 'is not built in'}): see `testbed doctor`"
        )
    gpu = torch.cuda.get_device_properties(0)
    if cfg.gpu_memory is not None:
        torch.cuda.set_per_process_memory_fraction(memory_fraction(cfg.gpu_memory, gpu.total_memory))
    sys.stderr.write(f"client {cfg.setup.client}: {describe_gpu(gpu, cfg.gpu_memory)}\n")


def keep_float32() -> None:
    """By default, PyTorch rounds the inputs of convolutions to 10 bits (TF32) on GPUs since Ampere."""
    import torch

    torch.backends.cudnn.allow_tf32 = False


def memory_fraction(limit: int, total: int) -> float:
    """Share of `total` bytes, at most 1."""
    return min(1.0, limit / total)


def describe_gpu(gpu: torch.cuda._CudaDeviceProperties, limit: int | None) -> str:
    """Text such as `trains on NVIDIA A2, 5 multiprocessors, 2048 of 15102 MiB`."""
    total = gpu.total_memory >> 20
    memory = f"{total} MiB" if limit is None else f"{limit >> 20} of {total} MiB"
    return f"trains on {gpu.name}, {gpu.multi_processor_count} multiprocessors, {memory}"


@contextmanager
def exit_when_out_of_memory(cfg: ClientConfig) -> Iterator[None]:
    """End the process with advice for the user."""
    try:
        yield
    except RuntimeError as error:
        if cfg.device == "cpu" or type(error).__name__ != "OutOfMemoryError":
            raise
        limit = "" if cfg.gpu_memory is None else f" of its {cfg.gpu_memory >> 20} MiB"
        (reason, *_) = str(error).splitlines() or [""]
        sys.exit(
            f"client {cfg.setup.client}: out of GPU memory{limit}: {reason} Raise gpu.memory in the "
            "topology, or lower batch_size"
        )


# Pace of a device: work that takes c seconds of CPU time lasts at least c/share seconds.
#
# A CPU quota is granted in slices, one per period. Work that begins with a full slice would end up to
# one period too early, which is much for a training of only a few slices. Local processes begin with a
# full budget likewise (`testbed.runtimes.process.duty_cycle`).


def share_in(file: Path) -> float | None:
    """Return the CPU share that `file` holds, in cores; None if the share is not limited yet."""
    with suppress(OSError, ValueError):
        return float(file.read_text())
    return None


class Pace:
    """Time by which a piece of work of this process must be extended.

    A piece includes all CPU time since the end of the previous one. So the CPU time for sending an
    update counts in the next training. It begins when the model arrives, so that no CPU time causes
    waiting twice.

    `share` returns the CPU share in cores, None if it is not limited; by default that of the control
    group. `cpu` returns the CPU seconds of the process, `clock` the host's monotonic time in seconds.
    """

    def __init__(
        self,
        share: Callable[[], float | None] | None = None,
        cpu: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share or ControlGroup.of_process().cores
        self._cpu, self._clock = cpu, clock
        self._paid = cpu()
        self._began, self._share_then = clock(), self._share()
        self._ended = self._began

    def begin(self, since: float | None = None) -> None:
        """Begin at `since`, in seconds of the clock, or now; not before the end of the previous piece,
        or now if that is in the future."""
        now = self._clock()
        self._began = now if since is None else min(now, max(since, self._ended))
        self._share_then = self._share()

    def end(self) -> float:
        """Return the host seconds that the emulated device would still need, 0 if none. If the share has
        changed during the work, the larger one counts.

        Call this only once per piece. Each call uses CPU time, which causes more waiting, so a loop
        would never end.
        """
        cpu = self._cpu()
        used, self._paid = cpu - self._paid, cpu
        shares = [one for one in (self._share_then, self._share()) if one is not None]
        self._ended = self._clock()
        if len(shares) < 2:
            return 0.0
        left = max(0.0, self._began + used / max(shares) - self._ended)
        self._ended += left
        return left

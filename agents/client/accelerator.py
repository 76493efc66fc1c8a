"""GPU of a client: its memory limit, and messages about it.

torch is imported inside the functions: that takes a second, and a client joins the run before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agents.config import ClientConfig

if TYPE_CHECKING:
    import torch


def prepare(cfg: ClientConfig) -> None:
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

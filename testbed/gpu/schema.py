"""Key `gpu` of a device group, and memory limits of devices that train on a GPU."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from testbed.topology.fields import DEFAULT_MEMORY, Model, PositiveShare, Size, expecting, optional

LEAST_GPU_MEMORY = 512 * 2**20
"""Bytes: CUDA's context alone takes some hundred MB."""
DEFAULT_MEMORY_WITH_GPU = 2 * 2**30
"""Bytes. CUDA's libraries need more memory than PyTorch itself."""


class GpuSettings(Model):
    """Share of a GPU of the host that each device of the group gets."""

    share: PositiveShare = optional(
        "Upper limit of the share of the GPU's multiprocessors (MPS active thread percentage)", 1.0
    )
    memory: (
        Annotated[Size, Field(ge=LEAST_GPU_MEMORY), expecting("a size of at least 512MiB")] | None
    ) = optional("Upper limit of GPU memory. Default: unlimited")

    @property
    def is_limited(self) -> bool:
        return self.share < 1 or self.memory is not None


def _gpu(value: Any) -> Any:
    if isinstance(value, bool):
        return GpuSettings() if value else None
    if value is not None and not isinstance(value, dict | GpuSettings):
        raise ValueError("expected true, or a part of a GPU such as {share: 25%, memory: 2GiB}")
    return value


class GpuKeys(Model):
    gpu: Annotated[
        GpuSettings | None, BeforeValidator(_gpu, json_schema_input_type=bool | GpuSettings | None)
    ] = optional("Train on a GPU of the host. true: a whole one. In runtime docker only", hidden=True)

    @property
    def default_memory(self) -> int:
        """Bytes."""
        return DEFAULT_MEMORY if self.gpu is None else DEFAULT_MEMORY_WITH_GPU

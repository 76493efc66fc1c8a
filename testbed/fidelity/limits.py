"""Comparison of requested limits of a device's container with those that the kernel enforces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agents.device.control_group import weights_of
from agents.fields import NO_LIMIT
from agents.wire.messages import CgroupLimits
from testbed.host.cpus import cpu_numbers

_PAGE_BYTES = 64 * 1024
"""Largest page size of common kernels, which round memory limits to whole pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedLimits:
    """Limits that the engine was asked to set. None if not requested, as on a real device, whose CPU
    quota alone is limited."""

    quota: int
    """µs of CPU time per period."""
    period: int
    """µs of a CFS period."""
    shares: int | None = None
    """CPU weight on the scale of cgroup v1, which container engines use."""
    cpus: str | None = None
    """Cores, as in `0,2-3`."""
    memory: int | None = None
    """Maximum memory in bytes; swap is not allowed."""


def differences(requested: RequestedLimits, found: CgroupLimits) -> Iterator[str]:
    """Yield a short text for each. Swap is not compared if the kernel cannot limit it."""
    quota = f"{found.quota} of {found.period} µs" if found.quota != NO_LIMIT else "none"
    if (found.quota, found.period) != (requested.quota, requested.period):
        yield f"its CPU quota is {quota}, requested {requested.quota} of {requested.period} µs"
    if (shares := requested.shares) is not None:
        if found.shares not in (None, shares):
            yield f"its CPU shares are {found.shares}, requested {shares}"
        if found.weight is not None and found.weight not in weights_of(shares):
            yield f"its CPU weight is {found.weight}, requested {_one_of(weights_of(shares))}"
    cpus = None if found.cpus is None else requested.cpus
    if cpus is not None and cpu_numbers(found.cpus or "") != cpu_numbers(cpus):
        yield f"its cores are {found.cpus or 'all'}, requested {cpus}"
    if (memory := requested.memory) is None:
        return
    if found.memory is None:
        yield f"this kernel cannot limit memory, requested {_bytes(memory)}"
    elif not 0 <= memory - found.memory < _PAGE_BYTES:
        yield f"its memory limit is {_bytes(found.memory)}, requested {_bytes(memory)}"
    if found.swap not in (None, 0):
        yield f"it may swap ({_bytes(found.swap)}), requested no swap"


def _one_of(weights: tuple[int, int]) -> str:
    return " or ".join(map(str, dict.fromkeys(weights)))


def _bytes(limit: int) -> str:
    return "without limit" if limit == NO_LIMIT else f"{limit} bytes"

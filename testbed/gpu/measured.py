"""Use of GPUs by devices, by NVML's samples.

The largest memory use of a client must be within its limit. If MPS has to limit the client, all samples
must show the client under MPS, because a client that did not find MPS has the whole GPU. NVML does not
report how many multiprocessors a client uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from testbed.fidelity.figures import rounded
from testbed.fidelity.measuring import number
from testbed.fidelity.part import Evidence, FeatureFigures
from testbed.fidelity.table import MAX_ROWS, NONE, number_text
from testbed.fidelity.validity import more_text
from testbed.gpu.planned import PlannedGpu

_CONTEXT_BYTES = 512 * 2**20
"""Upper bound of the memory of a process's CUDA context, which NVML counts, but the process does not
request. Usual values are some hundred MB; they were not measured here."""
_TITLES = ("device", "gpu", "got", "memory MiB", "at most", "SM use")


@dataclass(frozen=True, slots=True)
class GpuUse:
    requested: PlannedGpu
    samples: int
    """Number of samples in which the client used the GPU."""
    memory: int | None
    """Largest use in a sample, in bytes; None if NVML does not report it."""
    sm: float | None
    """Mean share of the time in which a kernel of the client ran; None if NVML does not report it, as
    for all clients of MPS."""
    outside: int
    """Number of samples that show the client outside MPS, although MPS has to limit it."""

    @property
    def over_memory(self) -> bool:
        """CUDA's context is allowed in addition."""
        limit = self.requested.memory
        return limit is not None and (self.memory or 0) > limit + _CONTEXT_BYTES

    def unjudged(self) -> Iterator[str]:
        """Yield a sentence for each check that was not possible."""
        if not self.samples:
            yield "its GPU: NVML saw no process of the device on it"
            return
        if self.requested.limited:
            yield (
                "its share of the GPU: MPS limited it, but NVML does not report on how many "
                "multiprocessors a client of MPS runs"
            )
        if self.requested.memory is not None and self.memory is None:
            yield "its GPU memory: NVML does not report the memory of the process"

    def as_dict(self) -> dict[str, Any]:
        return {
            "share": {"asked": self.requested.share, "got": None},
            "memory": {"asked": self.requested.memory, "got": self.memory},
            "sm": rounded(self.sm),
            "samples": self.samples,
            "outside": self.outside,
        }

    def row(self, device: str) -> tuple[str, ...]:
        held = "under MPS" if self.samples and not self.outside else NONE
        return (
            device,
            number_text(self.requested.share),
            held if self.requested.limited else NONE,
            number_text(self.requested.memory, 2**-20),
            number_text(self.memory, 2**-20),
            number_text(self.sm),
        )


def figures(evidence: Evidence) -> FeatureFigures | None:
    devices, clock = evidence.spec.plan.devices, evidence.clock
    seen: dict[str, list[Mapping[str, Any]]] = {one.name: [] for one in devices if one.gpu is not None}
    if not seen:
        return None
    for sample in evidence.samples():
        at, own, gpu = number(sample, "at"), seen.get(str(sample.get("device"))), sample.get("gpu")
        if at is None or own is None or not isinstance(gpu, Mapping):
            continue
        if clock.begin <= at - clock.epoch <= clock.end:
            own.append(gpu)
    uses = {one.name: _use(one.gpu, seen[one.name]) for one in devices if one.gpu is not None}
    return FeatureFigures(
        feature="gpu",
        devices={device: use.as_dict() for device, use in uses.items()},
        titles=_TITLES,
        rows=[use.row(device) for device, use in [*uses.items()][:MAX_ROWS]],
        reasons=[*_reasons(uses)],
        unjudged=[(device, why) for device, use in uses.items() for why in use.unjudged()],
    )


def _use(requested: PlannedGpu, samples: Iterable[Mapping[str, Any]]) -> GpuUse:
    seen = [one for one in samples if number(one, "memory") != 0 or one.get("mps") is True]
    memory = [value for one in seen if (value := number(one, "memory")) is not None]
    busy = [value for one in seen if (value := number(one, "sm")) is not None]
    return GpuUse(
        requested,
        samples=len(seen),
        memory=int(max(memory)) if memory else None,
        sm=sum(busy) / len(busy) if busy else None,
        outside=sum(one.get("mps") is not True for one in seen) if requested.limited else 0,
    )


def _reasons(uses: Mapping[str, GpuUse]) -> Iterator[str]:
    if free := [device for device, gpu in uses.items() if gpu.outside]:
        yield f"{free[0]} had its whole GPU: its client ran without MPS's limits{more_text(len(free))}"
    if over := [(device, gpu) for device, gpu in uses.items() if gpu.over_memory]:
        device, gpu = max(over, key=lambda each: each[1].memory or 0)
        yield (
            f"{device} took {(gpu.memory or 0) / 2**20:.0f} MiB of its GPU; the limit was "
            f"{(gpu.requested.memory or 0) / 2**20:.0f} MiB{more_text(len(over))}"
        )

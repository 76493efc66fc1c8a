"""What will be launched: the topology resolved for this host into concrete devices and quotas."""

from __future__ import annotations

from dataclasses import dataclass

from agents.config import Duration, Link, Local


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    name: str
    group: str
    cpu: float
    """Share of one host core."""
    memory: int
    """Bytes."""
    local: Local
    link: Link | None = None
    think: Duration | None = None

    @property
    def period(self) -> int:
        """CFS period in µs: 10 ms, longer where the quota would fall under the kernel's 1 ms."""
        return max(10_000, round(1_000 / self.cpu))

    @property
    def quota(self) -> int:
        """CFS quota in µs per period."""
        return round(self.cpu * self.period)

    @property
    def threads(self) -> int:
        """Torch threads: more than the quota's cores only wait for each other."""
        return max(1, -(-self.quota // self.period))

    @property
    def profile(self) -> str:
        """What to call this device's hardware in a table: `0.25 cpu, 512 MiB`."""
        return f"{self.cpu:g} cpu, {self.memory / 2**20:g} MiB"


@dataclass(frozen=True, slots=True)
class Plan:
    runtime: str
    """`docker` or `process`."""
    devices: tuple[PlannedDevice, ...]
    infrastructure_cpus: str
    """cpuset of broker and aggregator, as in `0` or `0-1`."""
    device_cpus: str
    """cpuset of the devices."""
    device_capacity: float
    """Cores that the devices can have in all."""
